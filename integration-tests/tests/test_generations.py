"""Generations through mlx-lm's own functions: what they share, and what is refused."""

import pydoc_data.topics

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from mlx_kv import CompressedKVCache, install, make_prompt_cache
from mlx_kv.testing.generation import greedy, installed
from mlx_kv.testing.models import tiny_model

pytestmark = pytest.mark.needs("kivi")

PROMPT = mx.random.randint(0, 96, (200,), key=mx.random.key(3))


def tokens(model, cache, prompt=PROMPT, **options):
    return [int(token) for token, _ in generate_step(prompt, model, prompt_cache=cache, max_tokens=12, **options)]


def test_two_generations_share_nothing():
    model = tiny_model("llama")
    alone = tokens(model, make_prompt_cache(model, "kivi(residual=32)"))
    first, second = make_prompt_cache(model, "kivi(residual=32)"), make_prompt_cache(model, "kivi(residual=32)")
    tokens(model, first, mx.random.randint(0, 96, (150,), key=mx.random.key(4)))
    assert tokens(model, second) == alone


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["dense", "kivi(residual=32)"])
def test_a_batch_of_real_texts_gives_every_row_its_own_tokens(smollm2, spec):
    """Texts of very different lengths, answers of different lengths."""
    model = smollm2.model
    text = smollm2.tokenizer.encode(pydoc_data.topics.topics["typesseq"])
    prompts, counts = [text[:120], text[400:407], text[500:550]], [3, 9, 6]
    alone = [
        greedy(model, prompt, make_prompt_cache(model, spec), n) for prompt, n in zip(prompts, counts, strict=True)
    ]
    with installed(model, spec):
        answer = batch_generate(model, smollm2.tokenizer, prompts, max_tokens=counts, return_token_ids=True)
    assert answer.token_ids == alone
    assert len({token for tokens in alone for token in tokens}) > 8


def test_offset_counts_tokens_seen():
    model = tiny_model("llama")
    ours, own = make_prompt_cache(model, "kivi(residual=32)"), own_prompt_cache(model)
    tokens(model, ours)
    tokens(model, own)
    assert [layer.offset for layer in ours] == [layer.offset for layer in own]


@pytest.mark.parametrize("name", ["bits", "to_quantized", "__len__", "__bool__"])
def test_attributes_that_would_mislead_mlx_lm_are_absent(name):
    assert not hasattr(make_prompt_cache(tiny_model("llama"), "kivi")[0], name)


def test_kv_bits_is_refused():
    model = tiny_model("gemma3_text")
    with pytest.raises(ValueError, match=r"\[mlx_kv\] kv_bits cannot be used"):
        tokens(model, make_prompt_cache(model, "kivi"), kv_bits=4)


def test_kv_bits_still_works_without_us():
    model = tiny_model("llama")
    make_prompt_cache(model, "kivi")  # wraps mlx-lm's functions
    cache = own_prompt_cache(model)
    tokens(model, cache, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert all(hasattr(layer, "bits") for layer in cache)


def test_install_and_undo():
    model = tiny_model("llama")
    undo = install(model, "kivi(residual=32)")
    first, second = own_prompt_cache(model), own_prompt_cache(model)
    assert all(isinstance(layer, CompressedKVCache) for layer in first)
    assert first[0] is not second[0]
    undo()
    assert all(type(layer) is KVCache for layer in own_prompt_cache(model))


def test_skipped_layers_stay_uncompressed_and_say_so():
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "kivi", skip_layers=[-1])
    assert type(cache[-1]) is KVCache
    assert cache[-1].uncompressed_reason == "skipped on request"
    assert isinstance(cache[0], CompressedKVCache)
    with pytest.raises(ValueError, match="expected skip_layers between"):
        make_prompt_cache(model, "kivi", skip_layers=[99])
