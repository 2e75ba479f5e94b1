"""attend against the float64 oracle on every backend that runs here, over all that it covers."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_kv_fused_attention import attend
from mlx_kv_kernels.testing import legs

# Half types: the matrix kernel rounds folded queries and probabilities to half, 2^-11 each, and the output to the
# model's dtype, up to 2^-9. float32: sums over a few hundred rows in another order.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-3}
# A logit is a sum over up to 256 channels of folded queries that are rounded so, and is absolute in a probability.
LOGIT_TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 1e-2}


# Every way to run a kernel costs compilations; what depends on values alone runs in the emulator's fastest mode, and on
# GPUs.
FASTEST = [leg for leg in legs() if dict(leg.settings).get("mode", "run") == "run"]


def kivi(bits, group_size, sinks=4, **options):
    named = {"bits": bits, "group_size": group_size, "residual": group_size, "sinks": sinks, **options}
    return f"kivi({', '.join(f'{name}={value}' for name, value in named.items())})"


# (store, key_dim, value_dim, group, dtype, logits): one compilation each, which takes seconds.
TILES = [
    (kivi(2, 64), 128, 128, 4, mx.float16, False),
    (kivi(2, 32, sinks=0), 128, 128, 8, mx.bfloat16, True),
    (kivi(4, 32), 64, 64, 3, mx.float16, True),
    (kivi(2, 32, key_bits=4), 192, 128, 1, mx.bfloat16, False),
    (kivi(8, 64, rollback=3), 64, 128, 2, mx.bfloat16, False),
    (kivi(2, 128), 64, 256, 7, mx.float16, False),
    (kivi(4, 32), 96, 96, 1, mx.float16, False),
    (kivi(2, 128), 256, 256, 8, mx.bfloat16, False),  # the most threadgroup memory
]
ROWS = [
    ("dense", 64, 64, 16, mx.float16, True),
    ("dense", 80, 80, 5, mx.float32, False),
    ("dense", 128, 96, 1, mx.bfloat16, False),
    ("dense", 192, 128, 4, mx.float32, True),
    ("dense", 256, 256, 16, mx.float32, False),
    (kivi(2, 32), 64, 64, 4, mx.float32, True),
    (kivi(3, 32), 128, 64, 2, mx.float16, False),
    (kivi(4, 64, sinks=0), 128, 128, 1, mx.float32, False),
    (kivi(8, 32, rollback=5), 96, 64, 3, mx.float32, False),
]


def check(tools, store, queries, scale, dtype, on=None, **options):
    truth = tools.oracle(queries, store, scale, options.get("sinks"))
    layout = store.layout()
    for leg in legs() if on is None else on:
        with leg.active():
            got = attend(queries, layout, scale, backend=leg.backend, **options)
            mx.eval(*got)
        output, logits, lse = got if options.get("logits") else (got, None, None)
        assert output.dtype == queries.dtype
        assert tools.error(output, truth[0]) < TOLERANCE[dtype], f"{leg}: output"
        if logits is not None:
            seen = np.isfinite(truth[1])
            assert np.array_equal(np.isneginf(tools.numbers(logits)), ~seen), f"{leg}: rows beyond a sequence"
            difference = np.abs(tools.numbers(logits)[seen] - truth[1][seen]).max(initial=0)
            assert difference < LOGIT_TOLERANCE[dtype], f"{leg}: logits"
            with np.errstate(invalid="ignore"):  # -inf - -inf: a sequence without rows
                difference = np.nan_to_num(tools.numbers(lse) - truth[2])
            assert np.abs(difference).max() < LOGIT_TOLERANCE[dtype], f"{leg}: lse"


@st.composite
def batches(draw):
    """What changes from step to step: rows as shares of the most, splits, an attention sink, the values."""
    shares = draw(st.lists(st.floats(0, 1), min_size=1, max_size=3))
    return {
        "shares": shares,
        "kv_heads": draw(st.integers(1, 2)),
        "sinks": draw(st.booleans()),
        "splits": draw(st.sampled_from([None, 1, 3])),
        "seed": draw(st.integers(0, 999)),
    }


def identify(value):
    return " ".join(str(x).removeprefix("mlx.core.") for x in value) if isinstance(value, tuple) else None


@pytest.mark.parametrize("case", TILES + ROWS, ids=identify)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batch=batches())
def test_parity(tools, case, batch):
    spec, key_dim, value_dim, group, dtype, logits = case
    packed = spec != "dense" and tools.config_of(spec)
    longest = 4 * packed.group_size + packed.rollback if packed else 40
    lengths = [1 + int(share * (longest - 1)) for share in batch["shares"]]
    if packed:
        lengths[0] = max(lengths[0], 2 * packed.group_size + packed.rollback)  # something is packed
    heads = group * batch["kv_heads"]
    store = tools.filled(spec, lengths, batch["kv_heads"], key_dim, value_dim, dtype, batch["seed"])
    queries = tools.queries(len(lengths), heads, key_dim, dtype, batch["seed"])
    sinks = mx.array(np.linspace(-2, 2, heads).astype(np.float32)).astype(dtype) if batch["sinks"] else None
    check(tools, store, queries, key_dim**-0.5, dtype, sinks=sinks, logits=logits, splits=batch["splits"])


@pytest.mark.parametrize("case", TILES, ids=identify)
def test_a_simdgroup_reads_several_groups(tools, case):
    """What is loaded and folded ahead is of the next group: the last one, and one in the middle."""
    spec, key_dim, value_dim, group, dtype, logits = case
    rows = 15 * tools.config_of(spec).group_size  # three or four groups of a threadgroup's four simdgroups each
    store = tools.filled(spec, [rows], 1, key_dim, value_dim, dtype)
    queries = tools.queries(1, group, key_dim, dtype)
    check(tools, store, queries, key_dim**-0.5, dtype, FASTEST, logits=logits, splits=1)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("splits", [None, 7])
def test_one_row_and_empty_splits(tools, dtype, splits):
    store = tools.filled("dense", [1], 2, 64, 64, dtype)
    check(tools, store, tools.queries(1, 4, 64, dtype), 0.125, dtype, splits=splits, logits=True)


def test_a_sequence_without_rows_is_zero(tools):
    store = tools.filled("dense", [5], 1, 64, 64, mx.float32)
    store.extend(store.blank(1))
    queries = tools.queries(2, 2, 64, mx.float32)
    check(tools, store, queries, 0.125, mx.float32, logits=True)
    for leg in legs():
        with leg.active():
            assert mx.all(attend(queries, store.layout(), 0.125, backend=leg.backend)[1] == 0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_equal_scores_give_the_mean(tools, dtype):
    store = tools.filled(kivi(2, 64), [200], 1, 64, 64, dtype)
    check(tools, store, mx.zeros((1, 2, 1, 64), dtype), 0.125, dtype, FASTEST, logits=True)


@pytest.mark.parametrize("size", [1e4, 1e-4])
@pytest.mark.parametrize("spec", [kivi(2, 64), "dense"], ids=["kivi", "dense"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_huge_and_tiny_rows(tools, dtype, spec, size):
    """Nothing overflows or is lost on the way, where numbers themselves fit; scores reach +-1e4 with huge queries."""
    store = tools.filled(spec, [200], 1, 64, 64, dtype, spread=size)
    queries = tools.queries(1, 2, 64, dtype)
    check(tools, store, queries, 0.125 / size, dtype, FASTEST)
    # Scores of +-1e4 have errors of their own in half types: the output is then one row's, and must be finite.
    for leg in FASTEST:
        with leg.active():
            output = attend(queries, store.layout(), 1e4 / size / 8, logits=True, backend=leg.backend)
            assert all(not mx.any(mx.isnan(x)) for x in output), f"{leg}"
            assert mx.all(mx.isfinite(output.output)), f"{leg}"


def test_bfloat16_beyond_half_is_kept(tools):
    """Never through half: values of 1e20 and queries of 1e6 survive."""
    store = tools.filled(kivi(4, 32), [150], 1, 64, 64, mx.bfloat16, spread=1e20)
    queries = tools.queries(1, 2, 64, mx.bfloat16) * 1e6
    check(tools, store, queries, 1e-27, mx.bfloat16, FASTEST)


def test_what_lies_behind_the_last_row_is_not_read(tools):
    store = tools.filled("dense", [9], 2, 64, 64, mx.float32)
    nothing = mx.full((1, 2, 1, 64), float("nan"))
    store.append(nothing, nothing)
    store.truncate(1)
    check(tools, store, tools.queries(1, 4, 64, mx.float32), 0.125, mx.float32, FASTEST)


def test_same_inputs_same_bits(tools):
    store = tools.filled(kivi(2, 64), [300], 2, 64, 64, mx.float16)
    queries = tools.queries(1, 8, 64, mx.float16)
    for leg in FASTEST:
        with leg.active():
            first, second = (attend(queries, store.layout(), 0.125, backend=leg.backend) for _ in range(2))
            assert mx.array_equal(first, second), f"{leg}"


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
def test_splits_change_nothing_but_rounding(tools, splits):
    store = tools.filled(kivi(2, 32), [333, 120], 1, 64, 64, mx.float32)
    check(tools, store, tools.queries(2, 4, 64, mx.float32), 0.125, mx.float32, FASTEST, splits=splits)


@pytest.mark.parametrize(
    ("queries", "options", "message"),
    [
        (mx.zeros((1, 4, 2, 64)), {}, r"expected queries \[batch, query_heads, 1, key_dim\]"),
        (mx.zeros((2, 4, 1, 64)), {}, r"expected queries \[1, query_heads, 1, 64\]"),
        (mx.zeros((1, 3, 1, 64)), {}, "expected 1 to 16 query heads per KV head, got 3 for 2"),
        (mx.zeros((1, 34, 1, 64)), {}, "expected 1 to 16 query heads per KV head, got 34 for 2"),
        (mx.zeros((1, 4, 1, 64), mx.float16), {}, "expected queries of the rows' dtype"),
        (mx.zeros((1, 4, 1, 64)), {"sinks": mx.zeros(3)}, r"expected sinks \[4\]"),
        (mx.zeros((1, 4, 1, 64)), {"splits": 0}, "expected splits of 1 or more"),
    ],
)
def test_refuses(tools, queries, options, message):
    store = tools.filled("dense", [9], 2, 64, 64, mx.float32)
    with pytest.raises(ValueError, match=r"\[fused_attention\] " + message):
        attend(queries, store.layout(), 0.125, **options)


def test_refuses_an_odd_head_dim(tools):
    store = tools.filled("dense", [9], 1, 72, 64, mx.float32)
    with pytest.raises(ValueError, match=r"expected head_dim in .*, got 72"):
        attend(mx.zeros((1, 4, 1, 72)), store.layout(), 0.125)


def test_the_reference_is_the_oracle(tools):
    store = tools.filled(kivi(2, 32), [200, 77], 2, 64, 64, mx.float32)
    queries, sinks = tools.queries(2, 4, 64, mx.float32), mx.array([0.5, -1.0, 2.0, 0.0])
    got = attend(queries, store.layout(), 0.125, sinks, logits=True, backend="reference")
    for x, y in zip(got, tools.oracle(queries, store, 0.125, sinks), strict=True):
        assert np.allclose(tools.numbers(x), y, rtol=1e-4, atol=1e-4)
