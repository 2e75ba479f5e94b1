"""Splits fill the device once, and depend on nothing but numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv_fused_attention import splits as module
from mlx_kv_fused_attention.splits import SIMDGROUPS, choose_splits


@pytest.fixture(autouse=True, scope="module")
def a_large_device():
    choose_splits.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cores", lambda: 132)
        yield
    choose_splits.cache_clear()


@given(
    outside=st.integers(1, 2000),
    groups=st.integers(0, 5000),
    group_rows=st.sampled_from([32, 64, 128]),
    heads=st.integers(1, 600),
    per_core=st.integers(1, 4),
)
def test_one_wave_and_no_idle_simdgroups(outside, groups, group_rows, heads, per_core):
    chosen = choose_splits(outside, groups * group_rows, group_rows, heads, per_core)
    assert chosen.rows >= 1
    assert (chosen.tiles >= 1) == (groups > 0)
    share = 132 * per_core // heads
    if share >= 2:
        assert chosen.rows + chosen.tiles <= share  # all threadgroups run at once
    assert chosen.tiles <= -(-groups // SIMDGROUPS)  # none without a group for a simdgroup
    assert chosen.rows <= -(-outside // SIMDGROUPS)


def test_a_long_context_fills_the_device():
    chosen = choose_splits(300, 262144, 64, 8, 3)
    assert chosen.rows + chosen.tiles == 132 * 3 // 8


def test_fixed():
    assert choose_splits(300, 4096, 64, 8, 3, 5).tiles == 5
    assert choose_splits(300, 0, 64, 8, 3, 5) == (5, 0)
