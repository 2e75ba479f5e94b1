"""window_scores, pool_scores and selection: every backend against the reference, the reference against float64."""

import logging

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import UnavailableBackendError, window
from mlx_kv_kernels.pooling import POOL_SCORES, pool_scores
from mlx_kv_kernels.testing import Leg, Mutant, array, arrays, check_case, check_parity, legs, surviving_mutants
from mlx_kv_kernels.window import WINDOW_SCORES, select_window_rows, window_scores

# Scores reach 300 here (256 equal products). Rounded once to float32 they are off by 300 * 2^-24 = 2e-5, which exp
# turns into a relative error; the reference and a kernel round them several times, in another order.
RTOL, ATOL = 1e-4, 1e-7


def oracle(queries, keys, scale=None, sinks=None, bias=None):
    batch, query_heads, count, dim = queries.shape
    kv_heads, rows = keys.shape[1:3]
    scores = queries @ np.repeat(keys, query_heads // kv_heads, axis=1).swapaxes(2, 3)
    scores = scores * (dim**-0.5 if scale is None else scale) + (0 if bias is None else bias[:, :, None])
    scores = np.where(np.arange(rows) <= np.arange(rows - count, rows)[:, None], scores, -np.inf)
    extra = -np.inf if sinks is None else sinks[:, None, None]
    largest = np.maximum(scores.max(-1, keepdims=True), extra)
    weights = np.exp(scores - largest)
    weights /= weights.sum(-1, keepdims=True) + np.exp(extra - largest)
    return weights.sum(2).reshape(batch, kv_heads, -1, rows).mean(2)


def pool_oracle(votes, window, kernel_size, pooling, sinks=0):
    """In float32, in ascending order: the result is to be the same to the bit."""
    rows, half = votes.shape[-1], kernel_size // 2
    pooled = np.full(votes.shape, np.inf, np.float32)
    for row in range(sinks, rows - window):
        near = votes[..., max(row - half, 0) : min(row + half + 1, rows - window)].astype(np.float32)
        if pooling == "max":
            pooled[..., row] = near.max(-1)
        else:
            total = np.zeros(votes.shape[:2], np.float32)
            for i in range(near.shape[-1]):
                total = total + near[..., i]
            pooled[..., row] = total * (np.float32(1) / np.float32(kernel_size))
    return pooled


# (group, queries, key_dim, dtype, with a bias): every value of each, in few combinations, since each is compiled.
VARIANTS = [
    (1, 1, 64, mx.float32, False),
    (2, 8, 16, mx.float16, True),
    (3, 3, 80, mx.bfloat16, False),
    (8, 4, 64, mx.bfloat16, True),
    (1, 24, 256, mx.float32, False),
]


@st.composite
def attention(draw):
    group, count, dim, dtype, biased = draw(st.sampled_from(VARIANTS))
    rows = draw(st.sampled_from([n for n in (1, 5, 16, 17, 127, 129) if n >= count]))
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    family = draw(st.sampled_from(["normal", "ties", "constant"]))
    queries = array(family, draw(st.integers(0, 99)), (batch, group * kv_heads, count, dim), dtype)
    keys = array(family, draw(st.integers(100, 199)), (batch, kv_heads, rows, dim), dtype)
    sinks = draw(st.none() | arrays((group * kv_heads,), families=["normal"]))
    bias = draw(arrays((batch, group * kv_heads, rows), families=["normal"])) if biased else None
    scale = draw(st.sampled_from([None, 0.3]))
    return {"queries": queries, "keys": keys, "scale": scale, "sinks": sinks, "bias": bias}


def test_window_scores_parity():
    check_parity(
        window_scores,
        attention(),
        oracle=oracle,
        rtol=RTOL,
        atol=ATOL,
        oracle_rtol=RTOL,
        oracle_atol=ATOL,
        examples=10,
    )


@st.composite
def votes_of_rows(draw):
    rows = draw(st.sampled_from([1, 2, 7, 50, 256, 257]))
    return {
        "votes": draw(arrays((draw(st.integers(1, 2)), 2, rows), families=["normal", "ties", "constant", "denormal"])),
        "window": draw(st.integers(0, rows)),
        "kernel_size": draw(st.sampled_from([1, 3, 7, 13])),
        "pooling": draw(st.sampled_from(["max", "avg"])),
        "sinks": draw(st.sampled_from([0, 1, 4])),
    }


def test_pool_scores_parity_to_the_bit():
    check_parity(pool_scores, votes_of_rows(), oracle=pool_oracle, examples=25)


def test_a_vote_that_is_no_number_spoils_its_neighbours():
    votes = array("nan", 3, (1, 2, 60))
    for pooling in ("max", "avg"):
        check_case(pool_scores, {"votes": votes, "window": 5, "kernel_size": 3, "pooling": pooling})


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_keys_are_read_in_place(dtype):
    """A view of a larger buffer, as a cache holds it, and one whose channels are not neighbours."""
    buffer = array("normal", 0, (1, 3, 200, 96), dtype)
    queries = array("normal", 1, (1, 6, 8, 32), dtype)
    for keys in (
        buffer[:, :, 7:157, :32],
        buffer[..., 1:33],
        buffer[..., ::3],
        buffer[..., :32].swapaxes(1, 2)[:, ::100],
    ):
        taken = queries if keys.shape[1] == 3 else array("normal", 1, (1, 4, 3, 32), dtype)
        check_case(
            window_scores, {"queries": taken, "keys": keys}, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL
        )


def test_several_threadgroups_share_the_rows():
    rows = 128 * 32 + 77  # more than one tile a threadgroup, and a last one that is ragged
    queries, keys = array("normal", 0, (1, 2, 9, 16)), array("normal", 1, (1, 1, rows, 16))
    check_case(
        window_scores, {"queries": 3 * queries, "keys": keys}, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL
    )


def test_more_queries_than_fit_at_a_time():
    queries, keys = array("normal", 0, (1, 2, 64, 256), mx.bfloat16), array("normal", 1, (1, 1, 70, 256), mx.bfloat16)
    check_case(window_scores, {"queries": queries, "keys": keys}, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL)


def test_the_reference_goes_tile_by_tile(monkeypatch):
    queries, keys, bias = array("normal", 0, (1, 4, 21, 16)), array("normal", 1, (1, 2, 40, 16)), mx.zeros((1, 4, 40))
    monkeypatch.setattr("mlx_kv_kernels.window_reference._TILE", 5 * 4 * 40)  # five queries at a time
    arguments = {"queries": queries, "keys": keys, "bias": bias + array("normal", 2, (1, 4, 40))}
    check_case(window_scores, arguments, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL)


def tied_keys(rows=300, seed=0):
    """Small whole numbers, so that dot products are exact; a third of the rows are copies of others."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-2, 3, (1, 2, rows, 64))
    keys[:, :, rng.integers(0, rows, rows // 3)] = keys[:, :, rng.integers(0, rows, rows // 3)]
    return mx.array(rng.integers(-2, 3, (1, 4, 16, 64)).astype(np.float32)), mx.array(keys.astype(np.float32))


@pytest.mark.parametrize(("kernel_size", "pooling"), [(1, "max"), (7, "avg")])
def test_selection_with_ties_is_the_reference_s(pooling, kernel_size):
    queries, keys = tied_keys()
    for budget in (16, 40, 300):
        arguments = {"queries": queries, "keys": keys, "budget": budget, "window": 16}
        check_case(select_window_rows, {**arguments, "kernel_size": kernel_size, "pooling": pooling, "sinks": 4})


def test_equal_keys_have_equal_votes_wherever_they_stand():
    queries = mx.array(np.random.default_rng(0).standard_normal((1, 2, 4, 64)).astype(np.float32))
    keys = np.random.default_rng(1).standard_normal((1, 1, 140, 64)).astype(np.float32)
    keys[:, :, [3, 20, 77, 130]] = keys[:, :, 50:51]
    for leg in legs():
        with leg.active():
            votes = window_scores(queries, mx.array(keys), backend=leg.backend)
        assert len({votes[0, 0, row].item() for row in (3, 20, 50, 77, 130)}) == 1


def test_sinks_come_before_votes_but_not_before_the_window():
    queries, keys = tied_keys(100)
    kept = select_window_rows(queries, keys, 20, 16, 7, "max", sinks=3, backend="reference")
    assert kept[0, 0, :3].tolist() == [0, 1, 2]
    kept = select_window_rows(queries, keys, 18, 16, 7, "max", sinks=9, backend="reference")
    assert kept[0, 0].tolist() == [0, 1, *range(84, 100)]


def test_a_window_wider_than_its_queries():
    queries, keys = tied_keys(100)
    kept = select_window_rows(queries[:, :, :2], keys, 40, 32, 7, "max", backend="reference")
    assert kept[0, 1, -32:].tolist() == list(range(68, 100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": mx.zeros((1, 3, 10, 16))}, "a divisor of 4"),
        ({"keys": mx.zeros((1, 2, 10, 32))}, "rows, 16"),
        ({"keys": mx.zeros((1, 2, 3, 16))}, "at least as many rows as queries, 5"),
        ({"keys": mx.zeros((1, 2, 10, 16), mx.float16)}, "dtype"),
        ({"keys": mx.zeros((2, 10, 16))}, "queries \\[batch"),
        ({"sinks": mx.zeros((2,))}, "sinks \\[4\\]"),
        ({"bias": mx.zeros((1, 2, 10))}, "bias float32 \\[1, 4, 10\\]"),
    ],
)
def test_window_scores_refuses(changes, message):
    with pytest.raises(ValueError, match=r"\[window_scores\] expected .*" + message):
        window_scores(**{"queries": mx.zeros((1, 4, 5, 16)), "keys": mx.zeros((1, 2, 10, 16)), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_size": 4}, "kernel_size odd, got 4"),
        ({"pooling": "sum"}, "pooling in"),
        ({"window": 11}, "window from 0 to 10"),
        ({"sinks": -1}, "sinks of 0 or more"),
        ({"votes": mx.zeros((1, 2, 10), mx.float16)}, "votes float32"),
    ],
)
def test_pool_scores_refuses(changes, message):
    arguments = {"votes": mx.zeros((1, 2, 10)), "window": 2, "kernel_size": 3, "pooling": "max"}
    with pytest.raises(ValueError, match=r"\[pool_scores\] expected .*" + message):
        pool_scores(**{**arguments, **changes})


def test_a_key_dim_without_a_kernel(emulated, caplog, monkeypatch):
    queries, keys = mx.zeros((1, 2, 3, 40)), mx.zeros((1, 1, 9, 40))
    with pytest.raises(UnavailableBackendError, match="key_dim a multiple of 16 up to 256"):
        window_scores(queries, keys, backend="emulator")
    monkeypatch.setattr(window, "resolve_backend", lambda backend: "emulator")  # as "auto" would find a GPU
    window._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        window_scores(queries, keys)
        window_scores(queries, keys)
    assert [record.message.count("got 40") for record in caplog.records] == [1]


CHECKED = [Leg("emulator", (("mode", "check"), ("order", order))) for order in (0, 1)]

SCORE_MUTANTS = [
    Mutant("rows - window + (base + query) % window + 1", "rows - window + (base + query) % window"),
    Mutant("bool real = base + query < total", "bool real = base + query <= total"),
    Mutant("k / 2 * QUARTER + i / 32 % PAIRS * 2 + k % 2", "k / 2 * QUARTER + i / 32 % PAIRS * 2"),
    Mutant("metal::min(row0, rows - 1)", "row0"),
    Mutant("row1 = row0 + 8;", "row1 = row0 + 7;"),
    Mutant("seen[n][c] = merge(seen[n][c], shuffled(seen[n][c], 16));", ""),
    Mutant("vote1 += simd_shuffle_xor(vote1, 1);", "vote1 += simd_shuffle_xor(vote1, 2);"),
    Mutant("(base == 0 ? 0.0f : votes[row0]) + vote0", "vote0"),
    Mutant("for (uint s = 0; s < splits; s++)", "for (uint s = 0; s < 1; s++)"),
    Mutant("sinks[query_head] * 1.44269504088896f", "sinks[query_head]"),
    Mutant("largest == -INFINITY ? 0.0f : largest", "largest"),
    Mutant("stride == 1 && reinterpret_cast<ulong>(from) % BYTES == 0", "stride == 1"),
    Mutant("matrices_of(words.z, words.w, to + i + HALF);", "matrices_of(words.z, words.w, to + i);"),
    Mutant("to[1] = matrix_of<half>(as_type<half2>(second));", "to[1] = to[0];"),
    Mutant("int(row1) < visible[query]", "int(row0) < visible[query]"),
    Mutant("(head * group + (base + query) / window) * rows", "(base + query) / window * rows"),
    Mutant("bias[own_bias[query] + row0]", "bias[own_bias[query] + row1]"),
]


def test_mutants_of_window_scores(emulated):
    """Ragged rows, sinks, three heads of two KV heads each, more queries than fit, several threadgroups, odd views."""
    normal = np.random.default_rng(0).standard_normal
    cases = [
        {"queries": normal((2, 6, 5, 16)), "keys": normal((2, 2, 21, 16)), "sinks": normal(6)},
        {"queries": normal((2, 6, 5, 16)), "keys": normal((2, 2, 21, 16)), "sinks": None, "bias": normal((2, 6, 21))},
        {"queries": 20 * normal((1, 2, 9, 16)), "keys": 20 * normal((1, 1, 300, 16)), "sinks": None},
        {"queries": normal((1, 4, 17, 16)), "keys": normal((1, 1, 20, 16)), "sinks": None},
    ]
    cases = [{name: x if x is None else mx.array(x.astype(np.float32)) for name, x in case.items()} for case in cases]
    half = {"queries": array("normal", 1, (1, 2, 3, 64), mx.float16), "sinks": None}
    odd = array("normal", 2, (1, 1, 40, 193), mx.float16)
    cases += [
        {**half, "keys": keys} for keys in (odd[..., 1:65], odd[..., ::3][..., :64], mx.contiguous(odd[..., :64]))
    ]

    def check():
        for case in cases:
            # large scores: exp2 of numbers in the hundreds loses digits, in reference and kernel alike
            check_case(
                window_scores, case, oracle=oracle, rtol=2e-3, atol=1e-6, oracle_rtol=2e-3, oracle_atol=1e-6, on=CHECKED
            )

    assert surviving_mutants(WINDOW_SCORES, SCORE_MUTANTS, check) == []


POOL_MUTANTS = [
    Mutant("HALF = KERNEL / 2", "HALF = KERNEL / 2 - 1"),
    Mutant("at = row - HALF", "at = row - HALF + 1"),
    Mutant("at <= row + HALF", "at < row + HALF"),
    Mutant("at < 0 ||", "at <= 0 ||"),
    Mutant("at >= end;", "at > end;"),
    Mutant("row < sinks", "row <= sinks"),
    Mutant("row >= end ? INFINITY", "row > end ? INFINITY"),
    Mutant("1.0f / float(KERNEL)", "1.0f / float(KERNEL + 1)"),
    Mutant("MEAN ? 0.0f : -INFINITY", "0.0f"),
    Mutant("|| metal::isnan(votes[own + at])", ""),
    Mutant("votes[own + at] > pooled ||", "votes[own + at] < pooled ||"),
    Mutant("rows - params[1]", "rows - params[0]"),
    Mutant("if (row < rows)", "if (row <= rows)"),
]


def test_mutants_of_pool_scores(emulated):
    rng = np.random.default_rng(0)
    votes = rng.standard_normal((1, 2, 41)).astype(np.float32) - 3
    spoilt = votes.copy()
    spoilt[0, 1, 20] = np.nan

    def check():
        for x in (votes, spoilt):
            for pooling in ("max", "avg"):
                arguments = {"votes": mx.array(x), "window": 5, "kernel_size": 5, "pooling": pooling, "sinks": 2}
                check_case(pool_scores, arguments, on=CHECKED)

    assert surviving_mutants(POOL_SCORES, POOL_MUTANTS, check) == []
