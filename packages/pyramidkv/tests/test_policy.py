"""PyramidKV in a cache: what each layer keeps, and that the model sees exactly that."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from mlx_kv import CompressedKVCache, make_prompt_cache, memory_report
from mlx_kv.testing import CHECKS, check_name, tiny_model
from mlx_kv.testing.driving import contents, feed, new_cache, random_tokens, same_bits
from mlx_kv.testing.window import MaskedCache
from mlx_kv_pyramidkv import PyramidKV, layer_budgets


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    check("pyramidkv(budget=100)")


def logits(model, cache, chunks, seed=0):
    tokens = mx.random.randint(0, 96, (1, sum(chunks)), key=mx.random.key(seed))
    outputs = []
    for n in chunks:
        outputs.append(model(tokens[:, :n], cache=cache))
        mx.eval(outputs[-1], [layer.state for layer in cache])
        tokens = tokens[:, n:]
    return mx.concatenate(outputs, axis=1)


def rows_held(cache):
    return [layer.store.lengths[0] for layer in cache if isinstance(layer, CompressedKVCache)]


# Chunks of fewer than 32 tokens: with more, mlx-lm sorts what it sends to the experts of gpt_oss, and MLX's product of
# sorted float32 rows is off by 1e-2 on CUDA, so that a token may go to another expert.
TURNS = [[31, 31, 31, 26, 1], [1] * 5, [31, 31, 31, 31, 6, 1], [1] * 3]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_tokens_after_eviction_equal_an_explicit_mask(family):
    """Field report 35, with layers that hold different numbers of rows under one mask of the model's."""
    model = tiny_model(family)
    cache, masked = make_prompt_cache(model, "pyramidkv(budget=40)"), own_prompt_cache(model)
    compressed = [i for i, layer in enumerate(cache) if isinstance(layer, CompressedKVCache)]
    assert compressed == [i for i, layer in enumerate(masked) if type(layer) is KVCache]
    for place, i in enumerate(compressed):
        masked[i] = MaskedCache(
            lambda seen, place=place: layer_budgets(len(compressed), 40, 8, 20, seen)[place], window=8
        )
    for seed, chunks in enumerate(TURNS):
        got, expected = logits(model, cache, chunks, seed), logits(model, masked, chunks, seed)
        # float32 logits of the order of 1 to 10 through several layers; a wrong row or position moves them by 0.1
        np.testing.assert_allclose(got, expected, atol=2e-3, err_msg=f"turn {seed}")
    seen = sum(map(sum, TURNS))
    assert [cache[i].offset for i in compressed] == [seen] * len(compressed)
    budgets = layer_budgets(len(compressed), 40, 8, 20, seen)
    assert rows_held(cache) == [rows + 3 for rows in budgets]
    assert sum(rows_held(cache)) == len(compressed) * 43


def test_only_compressed_layers_count():
    model = tiny_model("llama", num_hidden_layers=5)
    cache = make_prompt_cache(model, "pyramidkv(budget=40)", skip_layers=[0, -1])
    logits(model, cache, [199, 1])
    assert rows_held(cache) == layer_budgets(3, 40, 8, 20, 200)
    assert [layer.rows for layer in memory_report(cache).layers] == [200, *layer_budgets(3, 40, 8, 20, 200), 200]


@pytest.mark.parametrize(("length", "kept"), [(39, [39, 39]), (40, [40, 40]), (63, [40, 40]), (64, [64, 16])])
def test_short_prompts(length, kept):
    """Nothing below the budget, then uniform, then as steep as the prompt allows."""
    model = tiny_model("llama", num_hidden_layers=2)
    cache = make_prompt_cache(model, "pyramidkv(budget=40)")
    logits(model, cache, [length - 1, 1])
    assert rows_held(cache) == kept


def test_a_share_of_the_tokens_seen():
    model = tiny_model("llama", num_hidden_layers=4)
    cache = make_prompt_cache(model, "pyramidkv(budget=0.2)")
    for turn, seen in enumerate((200, 400)):
        logits(model, cache, [199, 1], turn)
        assert sum(rows_held(cache)) == 4 * seen // 5


def test_beta_of_one_is_uniform():
    tokens = random_tokens(0, 200)
    uniform, pyramid = new_cache("pyramidkv(budget=64, beta=1)"), new_cache("pyramidkv(budget=64)")
    for cache in (uniform, pyramid):  # one layer alone is uniform as well
        feed(cache, tokens, [199, 1])
    assert uniform.store.lengths == [64]
    assert contents(uniform.store) == contents(pyramid.store)


def test_a_budget_larger_than_the_prompt_changes_nothing():
    model = tiny_model("llama")
    chunks = [80, 39, 1, 1, 1]
    got = logits(model, make_prompt_cache(model, "pyramidkv(budget=200)"), chunks)
    assert same_bits(got, logits(model, own_prompt_cache(model), chunks))


def test_every_chunk_holds_every_layer_to_its_share():
    model = tiny_model("llama", num_hidden_layers=4)
    cache = make_prompt_cache(model, "pyramidkv(budget=40, every_chunk=True)")
    seen = 0
    for chunk in (100, 100, 100):
        logits(model, cache, [chunk], seen)
        seen += chunk
        assert rows_held(cache) == layer_budgets(4, 40, 8, 20, seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, "[pyramidkv] expected beta of 1 or more, got 0"),
        ({"beta": 2.5}, "[pyramidkv] expected beta of 1 or more, got 2.5"),
        (
            {"budget": 7},
            "[pyramidkv] expected budget of at least window + sinks = 8 rows, or a share between 0 and 1, got 7",
        ),
        ({"kernel_size": 2}, "[pyramidkv] expected kernel_size odd, got 2"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        PyramidKV(**options)
    assert str(raised.value) == message
