"""Kernels read arrays where they lie: MLX copies one that is not laid out row by row whenever a kernel is given it."""

import mlx.core as mx
import pytest

from mlx_kv.testing.driving import Tokens, feed, new_cache, random_tokens, step
from mlx_kv_kernels import launch

SPECS = [
    pytest.param("kivi(bits=2)", marks=pytest.mark.needs("kivi")),
    pytest.param("rvq", marks=pytest.mark.needs("rvq")),
    pytest.param("h2o(heavy=16, recent=16)", marks=pytest.mark.needs("h2o")),
    pytest.param("keyformer(budget=40)", marks=pytest.mark.needs("keyformer")),
    pytest.param("snapkv(budget=128, window=8)+kivi(residual=32)", marks=pytest.mark.needs("snapkv", "kivi")),
    pytest.param("h2o(heavy=96, recent=96)+rvq(center=False)", marks=pytest.mark.needs("h2o", "rvq")),
]


def from_a_projection(tokens):
    """The same tokens as a model hands them over: the heads of a token lie side by side."""
    return Tokens(
        *[mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (tokens.queries, tokens.keys, tokens.values)]
    )


@pytest.fixture
def watched_inputs(monkeypatch):
    """The kernel and name of each input given so far, and whether MLX would have copied it."""
    seen, build = {}, launch._build

    def watched(kernel, *variant):
        launcher = build(kernel, *variant)

        def call(*, inputs, **sizes):
            for name, x in zip(kernel.input_names, inputs, strict=True):
                copied = kernel.ensure_row_contiguous and x.size and not memoryview(x).c_contiguous
                seen[kernel.name, name] = bool(copied) or seen.get((kernel.name, name), False)
            return launcher(inputs=inputs, **sizes)

        return call

    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    monkeypatch.setattr(launch, "_build", watched)
    for forget in (launch.forget_launches, launch.launch_of.cache_clear):
        forget()
    yield seen
    for forget in (launch.forget_launches, launch.launch_of.cache_clear):
        forget()


@pytest.mark.needs("fused")
@pytest.mark.parametrize("spec", SPECS)
def test_no_step_copies_what_a_prompt_of_one_chunk_has_left(watched_inputs, spec):
    cache = new_cache(spec)
    feed(cache, from_a_projection(random_tokens(0, 256)))
    step(cache, from_a_projection(random_tokens(1, 1)))
    watched_inputs.clear()
    for seed in range(2, 6):
        step(cache, from_a_projection(random_tokens(seed, 1)))
    assert any(kernel.startswith("attend") for kernel, _ in watched_inputs)
    assert [given for given, copied in watched_inputs.items() if copied] == []
