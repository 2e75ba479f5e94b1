"""exchange: every backend against the reference, and that against float64; the rows that are read, and the mutants."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_fused_attention.exchange import exchange
from mlx_kv_kernels import Kernel
from mlx_kv_kernels.accumulate import Noise, Step
from mlx_kv_kernels.testing import Leg, Mutant, check_case, check_parity, surviving_mutants

# float32 sums of up to some hundred products and exponentials, in another order; the noise's logarithms.
TOLERANCES = {"rtol": 1e-4, "atol": 2e-5}


def oracle(
    queries, keys, values, newest_key, newest_value, overdue, taken, scale, scores, positions, step, sinks, noise
):
    """By definition, for a step without noise: each overdue row in its place, then softmax, scores and the lowest."""
    kv_heads, count = taken.shape[1], int(taken[-1, 0])
    group, key_dim, held = queries.shape[1] // kv_heads, queries.shape[3], step.rows - 1
    scores, positions, overdue, taken = (x.copy() for x in (scores, positions, overdue, taken))
    taken[-1] += 1
    outputs, rows, newest = [], (keys, values), (newest_key, newest_value)
    for head in range(kv_heads):
        keys, values = (x[0, head, :held].copy() for x in rows)
        for number, place in enumerate(taken[:count, head].astype(int)):
            keys[place], values[place] = np.split(overdue[0, head, number], [key_dim])
        keys, values = (np.concatenate([x, last[0, head]]) for x, last in zip((keys, values), newest, strict=True))
        own, place = scores[0, head, :, 0], positions[0, head, :, 0]
        own[held], place[held] = 0, step.position
        for h in range(head * group, (head + 1) * group):
            logits = np.append(scale * keys @ queries[0, h, 0], -np.inf if sinks is None else sinks[h])
            weights = np.exp(logits - logits.max())
            outputs.append(weights[:-1] @ values / weights.sum())
            hot = np.exp((logits - logits.max()) / step.temperature)
            own[: held + 1] += hot[:-1] / hot.sum() / group
        row = min((r for r in range(held + 1) if place[r] < step.window), key=lambda r: (own[r], -place[r]))
        own[row], place[row], taken[count, head] = own[held], step.position, row
        overdue[0, head, count] = np.concatenate([x[0, head, 0] for x in newest])
    return np.array(outputs)[None, :, None], scores, positions, overdue, taken


def case(seed, group, kv_heads, dims, held, count, with_sinks=False, noise=None, temperature=1.0, dtype=mx.float32):
    """Rows of which `count` have been overwritten since; what stands in their places no longer matters."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    room = held + 1 + seed % 3
    taken = np.zeros((33, kv_heads), np.uint32)
    taken[:count] = np.stack([rng.permutation(held)[:count] for _ in range(kv_heads)], axis=1)
    taken[-1] = count
    rows = [np.array(normal(1, kv_heads, room, dim).astype(mx.float32)) for dim in dims]
    for head in range(kv_heads):
        for x in rows:
            x[0, head, taken[:count, head]] = 50.0
    positions = np.stack([rng.permutation(2 * room)[:room] for _ in range(kv_heads)]).astype(np.int32)
    return {
        "queries": normal(1, group * kv_heads, 1, dims[0]),
        "keys": mx.array(rows[0]).astype(dtype),
        "values": mx.array(rows[1]).astype(dtype),
        "newest_key": normal(1, kv_heads, 1, dims[0]),
        "newest_value": normal(1, kv_heads, 1, dims[1]),
        "overdue": normal(1, kv_heads, 32, sum(dims)),
        "taken": mx.array(taken),
        "scale": 0.3,
        "scores": mx.array(rng.random((1, kv_heads, room, 1)).astype(np.float32)),
        "positions": mx.array(positions[None, ..., None]),
        "step": Step(0, held + 1, room, 2 * room, 2 * room - 1, True, temperature),
        "sinks": normal(group * kv_heads) if with_sinks else None,
        "noise": noise,
    }


CASES = st.builds(
    case,
    st.integers(0, 999),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 2),
    st.sampled_from([(64, 64), (80, 64), (64, 128)]),
    st.sampled_from([32, 61, 300]),
    st.sampled_from([0, 1, 17, 31]),
    st.booleans(),
    st.just(None),
    st.sampled_from([1.0, 1.7]),
)


def test_parity():
    check_parity(exchange, CASES, oracle=oracle, oracle_rtol=1e-4, oracle_atol=2e-5, examples=12, **TOLERANCES)


@pytest.mark.parametrize("group", [4, 16])
def test_parity_with_noise(group):
    drawn = case(3, group, 2, (64, 64), 200, 20, True, Noise(4294967291, 3, 0.5), 1.3)
    check_case(exchange, drawn, **TOLERANCES)


def test_half_types():
    """The output is rounded to the rows' dtype, which differs from the reference's by a unit of its last place."""
    drawn = case(4, 4, 2, (128, 128), 150, 9, dtype=mx.bfloat16)
    check_case(exchange, drawn, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": mx.zeros((1, 2, 1, 80))}, "expected queries"),
        ({"queries": mx.zeros((1, 2, 2, 64))}, "expected queries"),
        ({"queries": mx.zeros((1, 2, 1, 64), mx.float16)}, "expected queries of the rows' dtype"),
        ({"sinks": mx.zeros(3)}, "expected sinks"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=r"\[exchange\] " + message):
        exchange(**{**case(0, 1, 2, (64, 64), 40, 3), **changes})


MUTANTS = {
    ("mlx_kv", "exchanged_rows"): [
        Mutant("number << (8 * distance)", "number << distance"),
        Mutant("distance < 4 ?", "distance < 3 ?"),
        Mutant("found >> (8 * (row & 3)) & 0xff", "found & 0xff"),
        Mutant("row < count ?", "row <= count ?"),
        Mutant("if (own > 0) from", "if (own > 1) from"),
        Mutant("overdue + (own - 1) * STRIDE;", "overdue + own * STRIDE;"),
        Mutant("number <= own_taken[32 * kv_heads]", "number < own_taken[32 * kv_heads]"),
        Mutant("number <= own_taken[32 * kv_heads]", "number <= 32"),
        Mutant("own_taken[(number - 1) * kv_heads]", "own_taken[number - 1]"),
        Mutant("const device uint* own_taken = taken + kv_head;", "const device uint* own_taken = taken;"),
        Mutant("newest_key + kv_head * KEY_DIM", "newest_key"),
        Mutant("newest_value + kv_head * VALUE_DIM", "newest_value"),
        Mutant("overdue + KEY_DIM", "overdue"),
        Mutant("long(kv_head) * overdue_rows_shape[2] * STRIDE", "0"),
    ],
    ("mlx_kv_fused_attention", "append_overdue"): [
        Mutant("if (row == overdue) {", "if (row + 1 == overdue) {"),
        Mutant("newest_key[own_head * key_dim + channel]", "newest_key[channel]"),
        Mutant("own_head * (width - key_dim) + channel - key_dim]", "channel - key_dim]"),
        Mutant("channel < key_dim ?", "channel <= key_dim ?"),
        Mutant("T x = overdue_rows[i];", "T x = T(0);"),
        Mutant("i < kv_heads * size;", "i < size;"),
        Mutant("(row + 1 == uint(taken_shape[0]) ? 1 : 0)", "1"),
        Mutant("if (row != overdue) out_taken", "if (row < overdue) out_taken"),
        Mutant("if (row != overdue) out_taken", "out_taken"),
    ],
    ("mlx_kv_fused_attention", "rows"): [
        Mutant("keys.found = values.found = found[i * ROWS / 4];", "keys.found = found[i * ROWS / 4];"),
        Mutant("found[i * ROWS / 4];", "found[0];"),
        Mutant("keys.look(step + 4 * i)", "keys.look(step)"),
    ],
}


@pytest.mark.parametrize("file", MUTANTS)
def test_every_mutant_is_noticed(emulated, mutable_texts, file):
    """Keys and values of different dims, a group's heads, and every number of overdue rows from none to the last."""
    drawn = [case(i, 2, 2, (80, 64), 43, count) for i, count in enumerate((0, 5, 31))]
    drawn.append(case(3, 2, 2, (64, 128), 43, 31))  # few lanes share a row of these
    on = [Leg("emulator", (("mode", "check"), ("order", order))) for order in (0, 1)]

    def check():
        for each in drawn:
            check_case(exchange, each, oracle=oracle, oracle_rtol=1e-4, oracle_atol=2e-5, on=on, **TOLERANCES)

    assert surviving_mutants(Kernel(file[1], file[0], (), ()), MUTANTS[file], check) == []


ROW_NOISE = [
    Mutant("row == newest_row ? newest_position : positions[row]", "positions[row]"),
    Mutant("row_count - 1, steps", "row_count, steps"),
    Mutant("steps[3]", "steps[4]"),
    Mutant("kv_head * positions_shape[2]", "0"),
    Mutant("first_head + head", "head"),
    Mutant("kv_head * GROUP, uint", "kv_head, uint"),
    Mutant("precise_mul(scale, ", "("),
    Mutant("uint(seeds[0])", "0u"),
    Mutant("uint(seeds[1])", "0u"),
]


def test_every_mutant_of_the_noise_is_noticed(emulated, mutable_texts):
    drawn = case(3, 2, 2, (64, 64), 43, 5, noise=Noise(4294967291, 3, 0.5), temperature=1.3)

    def check():
        check_case(exchange, drawn, on=[Leg("emulator", (("mode", "check"), ("order", 0)))], **TOLERANCES)

    assert surviving_mutants(Kernel("row_noise", "mlx_kv_fused_attention", (), ()), ROW_NOISE, check) == []
