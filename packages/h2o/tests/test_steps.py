"""What a step of decoding costs: launches, waiting, copies."""

import mlx.core as mx
import pytest

from mlx_kv.testing.driving import SCALE, feed, new_cache, random_tokens, step
from mlx_kv_kernels.testing import not_run

SPEC = "h2o(heavy=20, recent=12)"
KERNELS = ("attend_rows", "merge_splits", "finish_exchange", "accumulate_scores")


def test_scores_take_one_launch_at_most(monkeypatch):
    """The row to go and the newest one in its place included; at a full budget attention's second launch does it."""
    if "emulator" in not_run():
        pytest.skip(not_run()["emulator"])
    emulator = pytest.importorskip("mlx_kv_emulator")
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    cache = new_cache(SPEC)
    feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(4):
        with emulator.counters() as launches:
            step(cache, random_tokens(i, 1))
        kernels = [kernel for launch in launches for kernel in KERNELS if launch.kernel.startswith(kernel)]
        assert len(kernels) == len(launches)
        if "attend_rows" not in kernels:  # fused attention is not installed
            assert kernels == ["accumulate_scores"]
        elif i == 0:  # the first row to go: nothing is overdue yet
            assert kernels == ["attend_rows", "merge_splits", "accumulate_scores"]
        else:
            assert kernels == ["attend_rows", "finish_exchange"]


def test_a_step_waits_for_nothing():
    """While a function is traced, MLX refuses to evaluate anything."""
    cache = new_cache(SPEC)
    feed(cache, random_tokens(0, 60), [59, 1])

    def answer(queries, keys, values):
        for _ in range(3):
            output = cache.attend(queries, *cache.update_and_fetch(keys, values), SCALE, cache.make_mask(1))
        return output

    tokens = random_tokens(1, 1)
    mx.compile(answer)(tokens.queries, tokens.keys, tokens.values)
    assert cache.store.lengths == [32]


def test_a_step_copies_no_rows():
    cache = new_cache("h2o(heavy=1000, recent=500)")
    feed(cache, random_tokens(0, 1600), [1599, 1])
    for i in range(3):
        step(cache, random_tokens(i, 1))
    tokens = random_tokens(9, 1)
    mx.eval(tokens.queries, tokens.keys, tokens.values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step(cache, tokens)
    # A copy would take all of an array's bytes. The step's own small arrays, which MLX's threads let go of in their own
    # time, take a sixth to a quarter.
    assert mx.get_peak_memory() - before < cache.store.keys.data.nbytes / 2


def test_room_beyond_the_budget_is_small():
    """One row comes before another goes; buffers that double for it would hold twice the budget."""
    cache = new_cache("h2o(heavy=128, recent=128)")
    feed(cache, random_tokens(0, 400), [399, 1])
    for i in range(40):
        step(cache, random_tokens(i, 1))
        cache.store.settle()
        assert cache.store.lengths == [256]
        assert cache.store.keys.data.shape[2] <= 256 + 32
