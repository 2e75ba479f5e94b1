"""The model families of mlx-lm: which layers are compressed, and that an uncompressed store changes nothing."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from mlx_kv import CompressedKVCache, UnsupportedModelError, make_prompt_cache, memory_report
from mlx_kv.testing.models import tiny_model

FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt_oss", "qwen3_next"]
SHARING = ["gemma4_text", "gemma3n"]
UNFIT = {
    "deepseek_v3": "changes keys or values",
    "mamba2": "ArraysCache",
    "gemma2": "does not go through",
    "stablelm": "changes keys or values",
    "plamo": "changes keys or values",
}


def greedy(model, cache, prompt, count):
    """Return the greedy tokens of mlx_lm's own generation loop."""
    steps = generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=count, prefill_step_size=96)
    return [int(token) for token, _ in steps]


def prompt_of(length, vocabulary=96):
    return mx.random.randint(0, vocabulary, (length,), key=mx.random.key(7)).tolist()


def full_attention_layers(model):
    return [i for i, cache in enumerate(own_prompt_cache(model)) if type(cache) is KVCache]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_gives_mlx_lm_tokens(family):
    model = tiny_model(family)
    prompt = prompt_of(230)
    own = greedy(model, own_prompt_cache(model), prompt, 40)
    assert greedy(model, make_prompt_cache(model, "dense"), prompt, 40) == own


def test_dense_gives_mlx_lm_tokens_on_smollm2(smollm2):
    prompt = smollm2.tokenizer.encode("A list is a mutable sequence. A tuple is")
    own = greedy(smollm2.model, own_prompt_cache(smollm2.model), prompt, 12)
    assert greedy(smollm2.model, make_prompt_cache(smollm2.model, "dense"), prompt, 12) == own


@pytest.mark.needs("kivi")
@pytest.mark.parametrize("family", FAMILIES)
def test_kivi_compresses_every_full_attention_layer(family):
    model = tiny_model(family)
    cache = make_prompt_cache(model, "kivi(bits=2, residual=32)")
    own = own_prompt_cache(model)
    prompt = prompt_of(640)
    greedy(model, cache, prompt, 4)
    greedy(model, own, prompt, 4)
    compressed = [i for i, layer in enumerate(cache) if isinstance(layer, CompressedKVCache)]
    assert compressed == full_attention_layers(model)
    for layer in memory_report(cache).layers:
        if layer.layer in compressed:
            # 2 bits and a float32 scale and minimum per 32 numbers are 4 of 32 bits; residual and room for growth come
            # on top.
            assert layer.bytes_held < 0.35 * own[layer.layer].nbytes
        else:
            assert layer.reason
            assert layer.bytes_held == own[layer.layer].nbytes


@pytest.mark.needs("kivi")
@pytest.mark.parametrize("family", SHARING)
def test_layers_that_share_keys_and_values_stay_as_they_are(family):
    model = tiny_model(family)
    cache = make_prompt_cache(model, "kivi(bits=2, residual=32)")
    own = own_prompt_cache(model)
    prompt = prompt_of(1024)
    greedy(model, cache, prompt, 4)
    greedy(model, own, prompt, 4)
    report = memory_report(cache).layers
    assert any(layer.method for layer in report)
    for layer in report:
        if layer.method:
            assert layer.bytes_held < 0.35 * own[layer.layer].nbytes
        else:
            assert layer.reason
            assert layer.bytes_held == own[layer.layer].nbytes


@pytest.mark.needs("kivi")
@pytest.mark.parametrize(("family", "reason"), UNFIT.items())
def test_unfit_families_are_refused_with_the_reason(family, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        make_prompt_cache(tiny_model(family), "kivi")


@pytest.mark.needs("kivi")
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_sliding_and_recurrent_layers_never_grow(family):
    model = tiny_model(family)

    def held(length):
        cache = make_prompt_cache(model, "kivi(residual=32)")
        greedy(model, cache, prompt_of(length), 2)
        return [layer.bytes_held for layer in memory_report(cache).layers if layer.method is None]

    assert held(400)
    assert held(400) == held(1000)
