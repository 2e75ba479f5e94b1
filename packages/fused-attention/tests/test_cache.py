"""Compressed caches of mlx-lm's models decode through the kernels, and give what the reference gives."""

import logging
import math
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

from mlx_kv import make_prompt_cache
from mlx_kv.attention import decode

SPEC = "kivi(bits=4, group_size=32, residual=32)"


@pytest.fixture(scope="module")
def model(tools):
    tools.config_of(SPEC)
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=97,
        tie_word_embeddings=False,
    )
    made = llama.Model(arguments)
    mx.eval(made.parameters())
    return made


@pytest.fixture
def fused(emulated, monkeypatch):
    """Attention alone runs in the emulator: what else has kernels stays with its reference."""

    def resolve(backend=None):
        return backend or "emulator"

    monkeypatch.setattr("mlx_kv_fused_attention.backend.resolve_backend", resolve)
    # The package's function `attend` hides the module of that name.
    monkeypatch.setattr(sys.modules["mlx_kv_fused_attention.attend"], "resolve_backend", resolve)
    return monkeypatch


def tokens(model, prompt, count):
    cache = make_prompt_cache(model, SPEC)
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)]


def test_generate_launches_the_kernels(model, emulated, monkeypatch):
    """Two launches for each layer of each decode step, once something is packed."""
    import mlx_kv_emulator

    prompt = np.random.default_rng(0).integers(0, 97, 100).tolist()
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    with mlx_kv_emulator.counters() as launches:
        tokens(model, prompt, 5)
    names = [launch.kernel for launch in launches]
    attends = sum("attend_rows" in name for name in names)  # a float32 model
    merges = sum("merge_splits" in name for name in names)
    # One more step is computed ahead than is returned; the prompt's last token is a step of its own.
    assert attends == merges >= 2 * 5


def test_generate_gives_the_references_tokens(model, emulated, request):
    prompt = np.random.default_rng(0).integers(0, 97, 100).tolist()
    expected = tokens(model, prompt, 6)
    request.getfixturevalue("fused")
    assert tokens(model, prompt, 6) == expected


def perplexity(model, text):
    cache = make_prompt_cache(model, SPEC)
    model(text[None, :80], cache=cache)
    losses = []
    for i in range(80, len(text) - 1):
        logits = model(text[None, i : i + 1], cache=cache)[0, -1].astype(mx.float32)
        losses.append((mx.logsumexp(logits) - logits[text[i + 1]]).item())
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_perplexity_is_the_references(model, emulated, request, dtype):
    text = mx.array(np.random.default_rng(1).integers(0, 97, 110))
    parameters = model.parameters()
    try:
        model.set_dtype(dtype)
        expected = perplexity(model, text)
        request.getfixturevalue("fused")
        assert perplexity(model, text) == pytest.approx(expected, rel=2e-3)
    finally:
        model.update(parameters)


def test_a_batch_decodes_as_its_sequences_do(tools, fused):
    """Sequences of a ragged batch, and each of them alone, attend to the same."""
    store = tools.filled("kivi(group_size=32, residual=32)", [150, 70, 1], 2, 64, 64, mx.float32)
    queries = tools.queries(3, 4, 64, mx.float32)
    output, _ = decode(store, queries, 0.125)
    for b in range(3):
        alone = decode(store.select([b]), queries[b : b + 1], 0.125) if b < 2 else None
        expected = tools.oracle(queries, store, 0.125)[0][b : b + 1]
        assert tools.error(output[b : b + 1], expected) < 1e-5
        if alone is not None:
            assert tools.error(alone[0], expected) < 1e-5


def test_logits_for_policies(tools, fused):
    store = tools.filled("kivi(group_size=32, residual=32)", [120], 2, 64, 64, mx.float32)
    queries = tools.queries(1, 4, 64, mx.float32)
    _, logits = decode(store, queries, 0.125, logits=True)
    assert logits.shape == (1, 4, 1, 120)
    assert np.allclose(np.array(logits[:, :, 0]), tools.oracle(queries, store, 0.125)[1], atol=1e-4)


def test_logits_of_dense_rows(tools, fused):
    """Beside MLX's own attention they would cost another look at all keys."""
    store = tools.filled("dense", [120], 2, 64, 64, mx.float32)
    queries = tools.queries(1, 4, 64, mx.float32)
    assert decode(store, queries, 0.125) is None
    output, logits = decode(store, queries, 0.125, logits=True)
    expected = tools.oracle(queries, store, 0.125)
    assert tools.error(output, expected[0]) < 1e-5
    assert np.allclose(np.array(logits[:, :, 0]), expected[1], atol=1e-4)


def test_the_reference_is_said_once(tools, fused, caplog):
    from mlx_kv.attention import _log_once

    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="mlx_kv"):
        for lengths, dim in (([9], 64), ([9, 8], 32)):
            store = tools.filled("dense", lengths, 2, dim, dim, mx.float32)
            queries = tools.queries(len(lengths), 4, dim, mx.float32)
            assert decode(store, queries, 0.125) is None
            assert decode(store, queries, 0.125) is None
    assert [r.message for r in caplog.records] == [
        "dense rows of one sequence are left to MLX's own attention, which reads them where they lie",
        "fused attention is not used for dense rows: expected head_dim in (64, 80, 96, 128, 192, 256), got 32",
    ]
