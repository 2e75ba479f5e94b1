"""accumulate_scores: every backend against the reference, the reference against float64; and the noise."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import UnavailableBackendError
from mlx_kv_kernels.accumulate import ACCUMULATE_SCORES, Noise, Step, accumulate_scores, row_noise, select_rows
from mlx_kv_kernels.testing import Leg, Mutant, array, check_case, check_parity, surviving_mutants

# float32 sums of up to some hundred exponentials, in another order; exp2 for exp, and the library's log in the noise.
RTOL, ATOL = 3e-5, 1e-7


def gumbel(seed, layer, head, position):
    """By Python's integers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    bits = mix(seed)
    for number in (layer, head, position):
        bits = mix((bits + 0x9E3779B9 + number) % 2**32)
    return -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))


def oracle(logits, scores, positions, steps, sinks=None, noise=None):
    scores, positions = scores.copy(), positions.copy()
    (query_heads,), kv_heads = logits.shape[1:2], len(scores)
    dropped = np.zeros((len(steps), kv_heads), np.uint32)
    for b, s in enumerate(steps):
        for head in range(kv_heads if s.rows else 0):
            own, place = scores[head, s.begin : s.limit], positions[head, s.begin : s.limit]
            own[s.rows - 1], place[s.rows - 1] = 0, s.position
            for h in range(head * query_heads // kv_heads, (head + 1) * query_heads // kv_heads):
                x = logits[b, h, : s.rows]
                if noise is not None:
                    x = x + noise.scale * np.array(
                        [gumbel(noise.seed, noise.layer, h, int(p)) for p in place[: s.rows]]
                    )
                x = np.append(x, -np.inf if sinks is None else sinks[h]) / s.temperature
                weights = np.exp(x - x.max())
                own[: s.rows] += (weights / weights.sum())[:-1] * kv_heads / query_heads
            if s.drops:
                others = [r for r in range(s.rows) if place[r] < s.window]
                row = min(others, key=lambda r: (-np.inf if np.isnan(own[r]) else own[r], -place[r]))
                own[row], place[row], dropped[b, head] = own[s.rows - 1], s.position, row
    return scores, positions, dropped


def case(rng, group, kv_heads, rows, rooms, drops, sinks=False, noise=None, temperature=1.0, family="normal"):
    """Sequences of `rows` in `rooms`, whose positions are shuffled; a third of the rows are newer than the window."""
    begins = np.cumsum([0, *rooms])
    total, batch = int(begins[-1]), len(rooms)
    positions = rng.permuted(np.tile(np.arange(total), (kv_heads, 1)), axis=1).astype(np.int32)
    steps = [
        Step(int(begin), n, int(begin) + room, total + 5, total - total // 3 if n > 3 else total + 5, drop, temperature)
        for begin, n, room, drop in zip(begins[:-1], rows, rooms, drops, strict=True)
    ]
    logits = array(family, int(rng.integers(99)), (batch, group * kv_heads, max(max(rows), 1)))
    return {
        "logits": 3 * logits,
        "scores": mx.array(rng.random((kv_heads, total)).astype(np.float32)),
        "positions": mx.array(positions),
        "steps": steps,
        "sinks": mx.array(rng.standard_normal(group * kv_heads).astype(np.float32)) if sinks else None,
        "noise": noise,
    }


@st.composite
def cases(draw):
    group, kv_heads = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    rows = draw(st.lists(st.sampled_from([0, 1, 2, 31, 200, 257]), min_size=1, max_size=2))
    rooms = [n + draw(st.sampled_from([0, 3])) for n in rows]
    drops = [n > 1 and draw(st.booleans()) for n in rows]
    noise = draw(st.none() | st.just(Noise(4294967291, 3, 0.5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    family, tau = draw(st.sampled_from(["normal", "constant"])), draw(st.sampled_from([1.0, 1.7]))
    if sum(rooms) == 0:
        rooms[0] = 1
    return case(rng, group, kv_heads, rows, rooms, drops, draw(st.booleans()), noise, tau, family)


def test_parity():
    check_parity(
        accumulate_scores,
        cases(),
        oracle=oracle,
        rtol=RTOL,
        atol=ATOL,
        oracle_rtol=RTOL,
        oracle_atol=ATOL,
        examples=15,
    )


def check_drawn(drawn, on=None):
    check_case(accumulate_scores, drawn, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL, oracle_atol=ATOL, on=on)


@pytest.mark.parametrize("group", [2, 16])
def test_more_rows_than_a_threadgroup_has_threads(group):
    """Of 16 query heads a thread holds two rows at a time: those of the first sequence come in batches."""
    check_drawn(case(np.random.default_rng(0), group, 1, [2100, 900], [2304, 1024], [True, True], noise=Noise(1, 2)))


def tied(rows=40):
    """Equal logits for all rows and equal scores for some: ties that are ties in every rounding."""
    positions = np.random.default_rng(3).permutation(rows)
    scores = np.where(np.arange(rows) % 3 == 0, 0.25, 0.5).astype(np.float32)
    step = Step(0, rows, rows, rows, rows, True)
    return {
        "logits": mx.zeros((1, 2, rows)),
        "scores": mx.array(np.stack([scores, scores])),
        "positions": mx.array(np.stack([positions, positions[::-1]]).astype(np.int32)),
        "steps": [step],
    }


def test_of_equal_scores_the_newest_goes():
    drawn = tied()
    check_case(accumulate_scores, drawn, oracle=oracle, rtol=RTOL, oracle_rtol=RTOL)
    dropped = accumulate_scores(**drawn, backend="reference")[2].tolist()[0]
    lowest = [row for row in range(39) if row % 3 == 0]
    expected = [max(lowest, key=lambda row, head=head: drawn["positions"][head, row].item()) for head in range(2)]
    assert dropped == expected


def test_a_score_that_is_no_number_goes_first():
    drawn = tied()
    drawn["scores"][0, 7] = float("nan")
    drawn["scores"][1, 8] = float("nan")
    check_case(accumulate_scores, drawn, oracle=oracle, rtol=RTOL, oracle_rtol=RTOL)
    assert accumulate_scores(**drawn, backend="reference")[2].tolist() == [[7, 8]]


CHECKED = [Leg("emulator", (("mode", "check"), ("order", 0)))]
MUTANTS = [
    Mutant("largest == -INFINITY ? 0.0f : largest", "largest"),
    Mutant("metal::max(a.largest, b.largest), base", "a.largest, base"),
    Mutant("b.position > a.position) ? b : a", "b.position < a.position) ? b : a"),
    Mutant("b.score < a.score ||", "b.score > a.score ||"),
    Mutant("x = (x ^ (x >> 15)) * 0x846ca68bu;", "x = (x ^ (x >> 14)) * 0x846ca68bu;"),
    Mutant("mix(hash + 0x9e3779b9u + next)", "mix(hash + next)"),
    Mutant("+ 0.5f) * (1.0f / 8388608.0f)", "+ 0.5f) * (1.0f / 16777216.0f)"),
    Mutant("steps[at + 6]", "steps[6]"),
    Mutant("kv_head * GROUP + g);", "g);"),
    Mutant("const float largest = simd_max(s.largest);", "const float largest = s.largest;"),
    Mutant("simd_sum(s.sum *", "(s.sum *"),
    Mutant("for (ushort mask = 1; mask < 32; mask *= 2)", "for (ushort mask = 2; mask < 32; mask *= 2)"),
    Mutant("seen[g] = merge_lanes(seen[g]);", ""),
    Mutant("merge(Statistics{sinks[kv_head * GROUP + g] * factor, 1}, merge_lanes(all))", "merge_lanes(all)"),
    Mutant("if (lane < SIMDGROUPS) all", "if (lane < 7) all"),
    Mutant("i * STEP < room && i * STEP + 1 != rows;", "i * STEP < room;"),
    Mutant("= i * STEP < rows ? of_head[", "= i * STEP < room ? of_head["),
    Mutant("= older ? positions[i * STEP] : newest;", "= positions[i * STEP];"),
    Mutant("sum += metal::exp2(r.logit[i][g] - origin);", "sum += metal::exp2(r.logit[i][g]);"),
    Mutant("if (row >= room) continue;", "if (row >= rows) continue;"),
    Mutant("if (r.position[i] < window)", "if (r.position[i] <= window)"),
    Mutant("metal::isnan(score) ? -INFINITY : score", "score"),
    Mutant("if (lane < SIMDGROUPS) lowest", "if (lane < 7) lowest"),
    Mutant("lowest.row % THREADS == thread_index", "lowest.row == thread_index + 1"),
    Mutant("        out_positions[own + lowest.row] = position;\n", ""),
    Mutant("steps[at + 2] - steps[at];", "steps[at + 1];"),
]


def test_mutants(emulated):
    """Two ragged sequences in one variant of the kernel, noise and sinks among all; ties, NaN and logits of -inf."""
    noise, rng = Noise(4294967291, 3), np.random.default_rng(0)
    drawn = [
        case(rng, 2, 2, [250, 9], [260, 12], [True, False], True, noise, 1.7),
        case(rng, 2, 2, [230, 241], [256, 256], [True, True], True, noise),
    ]
    second = drawn[1]["steps"]
    drawn[1]["steps"] = [second[0], second[1]._replace(temperature=0.5)]
    # The window begins at the position of the row with the lowest score.
    drawn[1]["scores"] = mx.where(drawn[1]["positions"] == second[0].window, 0.0, drawn[1]["scores"] + 1)
    drawn[0]["logits"][:, :, 3:200:7] = -float("inf")
    drawn[0]["scores"][:, 250 - 2] = -1.0
    for spoilt in (drawn[0], drawn[1]):
        spoilt["scores"][1, 40] = float("nan")
    ties = {**tied(), "logits": mx.zeros((1, 4, 40)), "noise": noise._replace(scale=0.0)}

    def check():
        for each in (*drawn, ties):
            check_drawn(each, CHECKED)

    assert surviving_mutants(ACCUMULATE_SCORES, MUTANTS, check) == []


OF_BATCHES = [
    Mutant("if (room > ROWS * THREADS || rows == 0) {", "if (room > ROWS * THREADS) {"),
    Mutant("if (room > ROWS * THREADS || rows == 0) {", "if (rows == 0) {"),
    Mutant("base < rows; base += ROWS * THREADS", "base < rows; base += 2 * ROWS * THREADS"),
    Mutant("? of_head[i * STEP]", "? of_head[i]"),
]


def test_mutants_of_batches(emulated):
    """More rows than a thread holds at a time, and a sequence without a token."""
    drawn = case(np.random.default_rng(0), 16, 1, [1100, 0], [1100, 3], [True, False])
    assert surviving_mutants(ACCUMULATE_SCORES, OF_BATCHES, lambda: check_drawn(drawn, CHECKED)) == []


def test_noise_is_gumbel_and_nothing_goes_together():
    heads, rows = 8, 4096
    positions = mx.broadcast_to(mx.arange(rows), (2, rows))
    drawn = np.stack([np.array(row_noise(Noise(seed, layer), positions, heads)) for seed in (0, 1) for layer in (0, 1)])
    drawn = drawn.reshape(-1, rows).astype(np.float64)
    uniform = np.exp(-np.exp(-drawn))
    # Kolmogorov-Smirnov against the uniform distribution: 1.95 / sqrt(n) is exceeded once in a thousand times.
    flat = np.sort(uniform.ravel())
    grid = np.arange(1, flat.size + 1) / flat.size
    assert np.abs(flat - grid).max() < 1.95 / flat.size**0.5
    # Correlations of n pairs have a deviation of 1 / sqrt(n); the largest of about 500 stays below 4.5 of them.
    between = np.corrcoef(uniform) - np.eye(len(uniform))
    assert np.abs(between).max() < 4.5 / rows**0.5
    following = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in uniform]
    assert np.abs(following).max() < 4.5 / rows**0.5


def test_noise_depends_on_the_position_alone():
    positions = mx.array([[5, 900, 3], [70000, 2, 3]])
    noise = row_noise(Noise(9, 4), positions, 4)
    expected = [[gumbel(9, 4, h, p) for p in positions[h // 2].tolist()] for h in range(4)]
    np.testing.assert_allclose(noise, expected, rtol=1e-5, atol=1e-6)  # log in float32


def test_select_rows():
    scores = mx.array([[[5.0, 1, 1, 9, 1, 0, 0]]])
    for backend in ("reference", "emulator"):
        try:
            assert select_rows(scores, 5, 2, backend=backend).tolist() == [[[0, 1, 3, 5, 6]]]
        except UnavailableBackendError:
            continue
    with pytest.raises(ValueError, match=r"\[select_rows\] expected 0 <= recent <= budget <= 7 rows, got 3 and 2"):
        select_rows(scores, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": mx.zeros((1, 3, 40))}, "a multiple of 2 heads"),
        ({"scores": mx.zeros((2, 40), mx.float16)}, "float32 scores"),
        ({"positions": mx.zeros((2, 41), mx.int32)}, r"positions int32 \[2, 40\]"),
        ({"steps": [Step(0, 40, 39, 0)]}, "tile 40 places"),
        ({"steps": [Step(0, 41, 40, 0)]}, "at most 40 rows"),
        ({"steps": []}, "1 steps whose rooms"),
    ],
)
def test_accumulate_scores_refuses(changes, message):
    with pytest.raises(ValueError, match=r"\[accumulate_scores\] expected .*" + message):
        accumulate_scores(**{**tied(), **changes})
