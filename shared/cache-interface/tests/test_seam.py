"""What mlx_kv changes in mlx-lm, and what it leaves alone."""

import sys

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models import base, llama
from mlx_lm.models import cache as mlx_lm_cache

from mlx_kv import UnsupportedModelError, install, make_prompt_cache
from mlx_kv.seam import connect
from mlx_kv.testing import tiny_model
from mlx_kv.testing.generation import greedy, random_prompt
from mlx_kv.testing.models import NAMES

WRAPPED = {
    "mlx_lm.models.base": "scaled_dot_product_attention",
    "mlx_lm.models.llama": "scaled_dot_product_attention",
    "mlx_lm.generate": "maybe_quantize_kv_cache",
    "mlx_lm.models.cache": "can_trim_prompt_cache",
}


def test_connecting_again_changes_nothing():
    connect()
    before = {module: getattr(sys.modules[module], name) for module, name in WRAPPED.items()}
    connect()
    for module, name in WRAPPED.items():
        assert getattr(sys.modules[module], name) is before[module]
        assert not hasattr(before[module].mlx_kv_wraps, "mlx_kv_wraps")
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


@pytest.mark.parametrize("make", [lambda: None, mlx_lm_cache.KVCache, lambda: mlx_lm_cache.RotatingKVCache(8)])
def test_other_caches_pass_untouched(make):
    connect()
    q, k, v = (mx.random.normal((1, 2, 5, 32), key=mx.random.key(i)) for i in range(3))
    original = base.scaled_dot_product_attention.mlx_kv_wraps
    got, right = (
        f(q, k, v, cache=make(), scale=0.3, mask="causal", sinks=mx.ones(2))
        for f in (base.scaled_dot_product_attention, original)
    )
    assert mx.array_equal(got, right)


def test_mlx_lms_quantised_caches_still_work():
    model = tiny_model("llama")
    make_prompt_cache(model, "dense")
    steps = generate_step(mx.array(random_prompt(0, 50)), model, max_tokens=5, kv_bits=8, quantized_kv_start=0)
    assert len(list(steps)) == 5


def test_kv_bits_with_a_compressed_cache_is_refused():
    model = tiny_model("gemma3_text")
    cache = make_prompt_cache(model, "dense")
    with pytest.raises(ValueError, match=r"\[mlx_kv\] kv_bits cannot be used with a compressed cache"):
        list(generate_step(mx.array([1, 2, 3]), model, prompt_cache=cache, kv_bits=4, quantized_kv_start=0))
    connect()
    maybe_quantize_kv_cache(cache, 0, 64, None)


def test_undoing_an_installation_gives_the_models_own_caches_back():
    for name in ("llama", "gemma3_text"):  # without and with a make_cache of its own
        model = tiny_model(name)
        before = [type(c) for c in mlx_lm_cache.make_prompt_cache(model)]
        undo = install(model, "dense")
        assert [type(c) for c in mlx_lm_cache.make_prompt_cache(model)] != before
        undo()
        assert [type(c) for c in mlx_lm_cache.make_prompt_cache(model)] == before


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("gemma2", "stablelm", "plamo", "deepseek_v3", "mamba2")]
)
def test_dense_rows_give_the_tokens_of_mlx_lms_own_cache(name):
    model = tiny_model(name)
    prompt = random_prompt(0, 150)
    own = greedy(model, prompt, mlx_lm_cache.make_prompt_cache(model), 40)
    assert greedy(model, prompt, make_prompt_cache(model, "dense"), 40) == own
    assert len(set(own)) > 5


def test_trimming_works_as_before():
    connect()
    assert mlx_lm_cache.can_trim_prompt_cache([mlx_lm_cache.KVCache()])
    assert not mlx_lm_cache.can_trim_prompt_cache([mlx_lm_cache.ArraysCache(2)])
    assert mlx_lm_cache.trim_prompt_cache([], 3) == 0
    assert mlx_lm_cache.trim_prompt_cache([mlx_lm_cache.ArraysCache(2)], 3) == 0
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "dense")
    greedy(model, random_prompt(0, 20), cache, 2)
    assert mlx_lm_cache.trim_prompt_cache(cache, 3) == 3
    assert cache[0].offset == 19


def test_a_refused_trim_changes_no_layer():
    """Layer 0 keeps mlx-lm's own cache, which takes back any number; the compressed one cannot after that much."""
    connect()
    cache = make_prompt_cache(tiny_model("llama"), "dense", skip_layers=[0])
    greedy(tiny_model("llama"), random_prompt(0, 20), cache, 2)
    cache[1].store.can_truncate = lambda n: n == 0
    with pytest.raises(ValueError, match="take back at most 0 tokens, got 3"):
        mlx_lm_cache.trim_prompt_cache(cache, 3)
    assert [layer.offset for layer in cache] == [22, 22]


def test_installs_are_undone_in_the_reverse_order():
    model = tiny_model("llama")
    first, second = install(model, "dense"), install(model, "dense")
    with pytest.raises(RuntimeError, match="the last install to be undone first"):
        first()
    second()
    first()
    with pytest.raises(RuntimeError, match="and once"):
        first()
    assert len(mlx_lm_cache.make_prompt_cache(model)) == 2


@pytest.mark.parametrize("skipped", [[0.5], [2], [-3], ["a"], [True]])
def test_layers_to_skip_are_indices(skipped):
    with pytest.raises(ValueError, match=r"\[mlx_kv\] expected skip_layers between -2 and 1"):
        make_prompt_cache(tiny_model("llama"), "dense", skip_layers=skipped)


def test_skipping_every_layer_is_refused():
    with pytest.raises(UnsupportedModelError, match="a layer to compress"):
        make_prompt_cache(tiny_model("llama"), "dense", skip_layers=[0, 1])


@pytest.mark.parametrize(("keys", "values"), [((1, 2, 3), (1, 2, 5)), ((1, 2, 3), (1, 1, 3)), ((2, 2, 3), (2, 2, 3))])
def test_rows_that_do_not_fit_together_change_nothing(keys, values):
    cache = make_prompt_cache(tiny_model("llama"), "dense")[0]
    cache.update_and_fetch(mx.zeros((1, 2, 4, 64)), mx.zeros((1, 2, 4, 64)))
    with pytest.raises(ValueError, match=r"\[mlx_kv\] expected keys and values of 1 sequences"):
        cache.update_and_fetch(mx.zeros((*keys, 64)), mx.zeros((*values, 64)))
    assert cache.offset == 4
    assert cache.store.lengths == [4]


def test_a_batch_grows_by_its_own_kind_alone():
    model = tiny_model("llama")
    dense, other = make_prompt_cache(model, "dense"), make_prompt_cache(model, "dense")
    for cache in (dense, other):
        greedy(model, random_prompt(0, 20), cache, 2)
    batch = type(dense[0]).merge([dense[0]])
    with pytest.raises(ValueError, match="one model, method and layer"):
        batch.extend(type(dense[0]).merge([other[1]]))
    assert batch.store.lengths == [22]


def test_no_tokens_are_taken_back_twice_or_given():
    cache = make_prompt_cache(tiny_model("llama"), "dense")[0]
    cache.update_and_fetch(mx.zeros((1, 2, 4, 64)), mx.zeros((1, 2, 4, 64)))
    with pytest.raises(ValueError, match="take back at most 0 tokens, got -1"):
        cache.trim(-1)
