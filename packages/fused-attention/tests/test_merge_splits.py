"""merge_splits: disjoint shares of the rows come out as all rows at once."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_fused_attention import merge_splits
from mlx_kv_fused_attention.merge import MERGE_SPLITS
from mlx_kv_kernels.testing import Leg, Mutant, check_case, check_parity, legs, surviving_mutants


def oracle(outputs, lse):
    largest = lse.max(axis=-1, keepdims=True)
    weights = np.exp2(lse - np.where(np.isinf(largest), 0, largest))
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        merged_lse = largest[..., 0] + np.log2(total)
    return (weights[..., None] * outputs).sum(axis=-2) / np.where(total > 0, total, 1)[..., None], merged_lse


def splits_of(seed, batch, splits, dim, empty, spread=2.0):
    rng = np.random.default_rng(seed)
    lse = rng.standard_normal((*batch, splits)) * spread
    lse[rng.random(lse.shape) < empty] = -np.inf
    outputs = rng.standard_normal((*batch, splits, dim)) * np.isfinite(lse)[..., None]
    return {"outputs": mx.array(outputs.astype(np.float32)), "lse": mx.array(lse.astype(np.float32))}


CASES = st.builds(
    splits_of,
    st.integers(0, 999),
    st.sampled_from([(1,), (2, 3), (1, 4, 1)]),
    st.sampled_from([1, 2, 17, 70]),
    st.sampled_from([64, 80, 128, 256]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 2.0, 200.0]),
)


def test_parity():
    # float32 sums of up to 70 splits, and exp2 of two libraries
    check_parity(
        merge_splits, CASES, oracle=oracle, rtol=1e-4, atol=1e-5, oracle_rtol=1e-4, oracle_atol=1e-5, examples=12
    )


def test_a_worked_example():
    """Four rows of weights 1, 3, 4, 8 in splits of two, and an empty split (hand-computed)."""
    outputs = mx.array([[4.0, 12.0], [16 / 3, 80 / 3], [0.0, 0.0]])
    lse = mx.array([np.log2(4), np.log2(12), -np.inf], dtype=mx.float32)
    for backend in ["reference", *(leg.backend for leg in legs())]:
        output, total = merge_splits(outputs, lse, backend=backend)
        assert np.allclose(np.array(output), [5, 23], rtol=1e-6)
        assert np.allclose(total.item(), 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "lse", "message"),
    [
        (mx.zeros((2, 3, 64)), mx.zeros((2, 2)), "expected outputs"),
        (mx.zeros((2, 0, 64)), mx.zeros((2, 0)), "expected outputs"),
        (mx.zeros((2, 3, 64), mx.float16), mx.zeros((2, 3)), "expected float32"),
    ],
)
def test_refuses(outputs, lse, message):
    with pytest.raises(ValueError, match=r"\[merge_splits\] " + message):
        merge_splits(outputs, lse)


MUTANTS = [
    Mutant("= partial_shape[1]", "= partial_shape[1] - 1"),
    Mutant("maximum = simd_max(maximum);", ""),
    Mutant("maximum = metal::max(maximum, own[i * (DIM + 1) + DIM])", "maximum = own[i * (DIM + 1) + DIM]"),
    Mutant(
        "if (maximum == -INFINITY) maximum = 0;",
        "",
        equivalent="a sum of NaN is not above zero either, but only where NaN is kept",
    ),
    Mutant("i = simdgroup; i < splits", "i = simdgroup + 1; i < splits"),
    Mutant("metal::exp2(split[DIM] - maximum)", "metal::exp2(split[DIM])"),
    Mutant("metal::exp2(split[DIM] - maximum)", "metal::exp(split[DIM] - maximum)"),
    Mutant("sum += weight;", "sum += 1;"),
    Mutant("value[c] += weight *", "value[c] += "),
    Mutant("= own + i * (DIM + 1);", "= own;"),
    Mutant("    threadgroup_barrier(mem_flags::mem_threadgroup);\n    sum = 0;", "    sum = 0;"),
    Mutant("sum += sums[i];", "sum = sums[i];"),
    Mutant("merged += values[i * DIM + c]", "merged += values[c]"),
    Mutant("= sum > 0 ? merged / sum : 0.0f;", "= merged / sum;"),
    Mutant("long(head) * splits * (DIM + 1)", "long(head) * splits * DIM"),
    Mutant("c * 32 + lane < DIM) values[", "c * 32 + lane <= DIM) values["),
]


def test_every_mutant_is_noticed(emulated, mutable_texts):
    drawn = [splits_of(1, (2, 2), 70, 80, 0.3), splits_of(2, (2,), 70, 64, 0.0, 400.0), splits_of(3, (2,), 2, 64, 1.0)]
    checked = [Leg("emulator", (("mode", "check"), ("order", 0)))]

    def check():
        for case in drawn:
            check_case(merge_splits, case, rtol=1e-4, atol=1e-5, on=checked)

    assert surviving_mutants(MERGE_SPLITS, MUTANTS, check) == []
