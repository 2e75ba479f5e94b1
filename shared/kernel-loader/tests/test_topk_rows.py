"""topk_rows: exact on every backend, against its reference and a NumPy sort in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import topk_rows
from mlx_kv_kernels.rows import TOPK_ROWS
from mlx_kv_kernels.testing import FAMILIES, Leg, Mutant, array, arrays, check_case, check_parity, surviving_mutants


def oracle(scores, k, lengths=None):
    """Sorted by: valid before padding, numbers before NaN, higher before lower, lower row first."""
    batch, kv_heads, rows = scores.shape
    kept = np.empty((batch, kv_heads, k), dtype=np.uint32)
    row = np.arange(rows)
    for b in range(batch):
        valid = row < (rows if lengths is None else np.asarray(lengths)[b])
        for h in range(kv_heads):
            # a row of padding sorts as NaN: it lies behind every valid row, so it loses to a valid NaN as well
            score = np.where(valid, scores[b, h], np.nan)
            order = np.lexsort((row, -score, np.isnan(score)))
            kept[b, h] = np.sort(order[:k])
    return kept


@st.composite
def cases(draw):
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = draw(st.sampled_from([1, 2, 3, 7, 8, 31, 33, 100, 127, 128, 129, 256, 1000, 1023]))
    k = draw(st.sampled_from(sorted({1, max(1, rows // 3), max(1, rows - 1), rows})))
    lengths = draw(st.none() | st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
    return {"scores": draw(arrays((batch, kv_heads, rows))), "k": k, "lengths": lengths}


def test_parity():
    check_parity(topk_rows, cases(), oracle=oracle, examples=25)


@pytest.mark.parametrize(
    ("rows", "family"), [*((2049, family) for family in FAMILIES), (20001, "ties"), (20001, "nan")]
)
def test_parity_of_the_wide_variant(rows, family):
    scores = array(family, seed=rows, shape=(1, 2, rows))
    check_case(topk_rows, {"scores": scores, "k": rows // 5}, oracle=oracle)


def test_every_row_has_the_same_bits_but_one():
    scores = np.zeros((1, 1, 4099), dtype=np.float32)
    scores[0, 0, 4098] = np.float32(1e-45)  # one unit in the last place: only the last pass can tell
    check_case(topk_rows, {"scores": mx.array(scores), "k": 3}, oracle=oracle)
    assert topk_rows(mx.array(scores), 3, backend="reference").tolist() == [[[0, 1, 4098]]]


def test_ties_go_to_the_lowest_row_and_nan_loses_to_everything():
    inf, nan = float("inf"), float("nan")
    scores = mx.array([[[nan, -inf, 0.0, -0.0, nan, inf]]])
    for k, expected in [(1, [5]), (2, [2, 5]), (3, [2, 3, 5]), (4, [1, 2, 3, 5]), (5, [0, 1, 2, 3, 5])]:
        assert topk_rows(scores, k, backend="reference").tolist() == [[expected]]
        check_case(topk_rows, {"scores": scores, "k": k}, oracle=oracle)


def test_a_sequence_shorter_than_k_keeps_all_its_rows():
    scores = mx.array([[[1.0, float("nan"), 9.0, 9.0, 9.0]]])
    assert topk_rows(scores, 3, lengths=[2], backend="reference").tolist() == [[[0, 1, 2]]]
    check_case(topk_rows, {"scores": scores, "k": 3, "lengths": [2]}, oracle=oracle)


def test_scores_that_start_at_an_odd_address():
    flat = mx.array(np.random.default_rng(0).standard_normal(4 * 64 + 1).astype(np.float32))
    check_case(topk_rows, {"scores": flat[1:].reshape(1, 4, 64), "k": 9}, oracle=oracle)


@pytest.mark.parametrize(
    ("scores", "k", "lengths", "message"),
    [
        (mx.zeros((2, 8)), 1, None, "expected scores float32"),
        (mx.zeros((1, 2, 8), dtype=mx.float16), 1, None, "expected scores float32"),
        (mx.zeros((1, 2, 8)), 0, None, "expected 1 <= k <= 8"),
        (mx.zeros((1, 2, 8)), 9, None, "expected 1 <= k <= 8"),
        (mx.zeros((1, 2, 8)), 3, [1, 2], r"expected lengths \[1\], got \[2\]"),
    ],
)
def test_refuses(scores, k, lengths, message):
    with pytest.raises(ValueError, match=r"\[topk_rows\] " + message):
        topk_rows(scores, k, lengths)


MUTANTS = [
    Mutant("nan ? 0 : key", "nan ? ~0u : key"),
    Mutant("> 0x7f800000u;", ">= 0x7f800000u;"),
    Mutant("key + uint(key == 0x7fffffffu)", "key"),
    Mutant("(uint(int(bits) >> 31) | 0x80000000u)", "0x80000000u"),
    Mutant("(uint(int(bits) >> 31) | 0x80000000u)", "uint(int(bits) >> 31)"),
    Mutant("if (row < length) bits.x", "if (row <= length) bits.x"),
    Mutant("if (row + 3 < length) bits.w", "if (row + 2 < length) bits.w"),
    Mutant("aligned && row + 4 <= length", "aligned && row < length"),
    Mutant("scores_shape[1], rows = scores_shape[2]", "scores_shape[0], rows = scores_shape[2]"),
    Mutant("params[1 + head / kv_heads]", "params[1]"),
    Mutant("base + 4 * (n * THREADS + thread_index), length", "base + 4 * (n * THREADS + lane), length"),
    Mutant("base < rows; base += 4 * THREADS * AHEAD", "base < rows; base += 8 * THREADS * AHEAD"),
    Mutant("base + 4 * n * THREADS >= rows", "base + 4 * n * THREADS + 1024 >= rows"),
    Mutant("pass < 3", "pass < 2"),
    Mutant("shift = pass == 0 ? 21 : pass == 1 ? 10 : 0", "shift = pass == 0 ? 21 : pass == 1 ? 11 : 0"),
    Mutant("digits = pass == 2 ? 1023 : 2047", "digits = pass == 2 ? 511 : 2047"),
    Mutant("digits = pass == 2 ? 1023 : 2047", "digits = pass == 2 ? 1023 : 1023"),
    Mutant(
        "            atomic_store_explicit(&histogram[bin], 0u, memory_order_relaxed);\n        }\n"
        "        threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "            atomic_store_explicit(&histogram[bin], 0u, memory_order_relaxed);\n        }\n",
    ),
    Mutant("if (((keys[i] ^ kth) & known) == 0) {", "{"),
    Mutant("other |= ((keys[i] ^ kth) & known) |", "other |="),
    Mutant("| (((keys[i] >> shift) & digits) ^ first);", ";"),
    Mutant("other |= ((keys[i]", "other = ((keys[i]"),
    Mutant("&histogram[first], 128u,", "&histogram[first], 127u,"),
    Mutant("if (simd_all(other == 0)) {", "if (simd_any(other == 0)) {"),
    Mutant("if (lane == 31) partial[simdgroup] = above + own_count;", "if (lane == 31) partial[simdgroup] = above;"),
    Mutant(
        "partial[simdgroup] = above + own_count;\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "partial[simdgroup] = above + own_count;\n",
    ),
    Mutant("if (above < wanted && wanted <= above + own_count)", "if (above <= wanted && wanted <= above + own_count)"),
    Mutant("chosen[1] = wanted - above;", "chosen[1] = wanted;"),
    Mutant("known |= digits << shift;", ""),
    Mutant(
        "end = metal::min(begin + share, rows)",
        "end = begin + share",
        equivalent="rows behind the last have key 0 and no row follows them, so they are never among the k",
    ),
    Mutant("(128 * SIMDGROUPS) * 128;", "(128 * SIMDGROUPS) * 64;"),
    Mutant(
        "        partial_equal[simdgroup] = equal;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "        partial_equal[simdgroup] = equal;\n    }\n",
    ),
    Mutant("keys[i] == kth && lane_equal < wanted", "keys[i] == kth && lane_equal <= wanted"),
    Mutant("metal::min(lane_equal, wanted)", "lane_equal"),
    Mutant("lane_equal = equal + (before >> 16)", "lane_equal = equal"),
    Mutant("above += total & 0xffffu;", ""),
    Mutant("equal += total >> 16;", ""),
    Mutant(
        "const bool aligned = reinterpret_cast<ulong>(own_scores) % 16 == 0;",
        "const bool aligned = false;",
        equivalent="16-byte loads are faster, not different",
    ),
]


def test_every_mutant_is_noticed(emulated):
    inf, nan = np.inf, np.nan
    rng = np.random.default_rng(0)
    ties = np.round(rng.standard_normal((2, 3, 700)), 1)
    special = np.where(rng.random((2, 1, 130)) < 0.5, rng.choice([inf, -inf, nan, 0.0, -0.0], (2, 1, 130)), -1.5)
    low_bits = (rng.integers(0x3F800000, 0x3F800000 + 2**12, (1, 1, 300), dtype=np.uint32)).view(np.float32)
    two_steps = np.round(rng.standard_normal((1, 1, 1900)), 1)  # a simdgroup's share is more than 128 rows
    # what must not pass for 128 equal keys: one digit shared by keys of another prefix; every fourth key equal
    other_prefix = np.r_[np.full(128, 0x3F001400), 0x3F800000 + 1024 * (np.arange(128) % 5)].astype(np.uint32)
    fourths = np.where(np.arange(256) % 4 == 3, 1.0, rng.standard_normal(256))
    fourths[::128] = 1.0
    wide = np.repeat(rng.standard_normal((1, 1, 500)), 5, axis=-1)  # the variant of 1024 threads
    long = np.round(rng.standard_normal((1, 1, 20001)), 1)  # more than AHEAD loads a thread, in every loop
    drawn = [
        {"scores": ties[..., :161], "k": 160, "lengths": [161, 6]},
        {"scores": ties, "k": 100, "lengths": [700, 335]},
        {"scores": special, "k": 25},
        {"scores": special, "k": 100, "lengths": [129, 130]},
        {"scores": low_bits, "k": 77},
        {"scores": np.repeat([[[1.0, 5.0, 3.0]]], 256, axis=-1), "k": 300},
        {"scores": other_prefix.view(np.float32)[None, None], "k": 20},
        {"scores": fourths[None, None], "k": 90},
        {"scores": two_steps, "k": 800},
        {"scores": wide, "k": 1234},
        {"scores": long, "k": 9000},
    ]
    for case in drawn:
        case["scores"] = mx.array(case["scores"].astype(np.float32))
    checked = [Leg("emulator", (("mode", "check"), ("order", order))) for order in (0, 1)]

    def check():
        for case in drawn:
            check_case(topk_rows, case, oracle=oracle, on=checked)

    assert surviving_mutants(TOPK_ROWS, MUTANTS, check) == []
