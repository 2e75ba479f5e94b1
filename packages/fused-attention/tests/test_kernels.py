"""The attention kernels' traffic, and the mutants that their tests must notice."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.accumulation import AccumulatingPolicy
from mlx_kv_fused_attention import attend
from mlx_kv_kernels import Kernel
from mlx_kv_kernels.testing import Leg, Mutant, surviving_mutants

CHECKED = Leg("emulator", (("mode", "check"), ("order", 0)))
PACKAGE = "mlx_kv_fused_attention"


def launches(queries, store, scale, **options):
    import mlx_kv_emulator

    with CHECKED.active(), mlx_kv_emulator.counters() as counted:
        mx.eval(attend(queries, store.layout(), scale, backend="emulator", **options))
    return counted


def traffic(tools, group, dtype):
    """What attend reads of 257 rows: 256 keys are packed, and 192 values; the rest of both is read one by one."""
    store = tools.filled("kivi(bits=2, group_size=64, residual=64, sinks=0)", [257], 2, 128, 128, dtype)
    counted = launches(tools.queries(1, 2 * group, 128, dtype), store, 0.1, splits=2)
    assert len(counted) == 2  # attend, and its merge
    return counted[0].buffers


@pytest.mark.parametrize(("group", "dtype"), [(1, mx.float16), (2, mx.float16), (8, mx.float16), (4, mx.float32)])
def test_packed_bytes_are_read_once_per_kv_head(tools, emulated, group, dtype):
    buffers = traffic(tools, group, dtype)
    for side, packed in (("key", 256), ("value", 192)):
        codes = buffers[f"{side}_codes"]
        assert codes.bytes_read == codes.distinct_bytes_read == 2 * packed * 128 * 2 // 8


def test_no_query_head_reads_rows_again(tools, emulated):
    few, many = (traffic(tools, group, mx.float32) for group in (2, 8))
    for name in few.keys() - {"queries", "partial"}:
        assert few[name].bytes_read == many[name].bytes_read


MUTANTS = {
    "attend_tiles": [
        Mutant("split < row_splits) {\n        attend", "split <= row_splits) {\n        attend"),
        Mutant("split * SIMDGROUPS + simdgroup, row_splits", "split * SIMDGROUPS, row_splits"),
        Mutant("before + int(groups * (part + 1) / parts)", "before + int(groups * part / parts) + 1"),
        Mutant("before = tiles_begin / TILE_ROWS", "before = 0"),
        Mutant("largest = simd_max(largest);", ""),
        Mutant("        spread_query<Shape>(", "        if (split == row_splits) spread_query<Shape>("),
        Mutant("(splits - row_splits) * SIMDGROUPS", "splits * SIMDGROUPS"),
        Mutant("rows.value[own][c] * weight.x", "rows.value[own][c]"),
        Mutant("weighed + (h - first) * OF_HEAD, partial", "weighed, partial"),
        Mutant("* OF_HEAD + simdgroup * 32 * VC;", "* OF_HEAD;"),
        Mutant("long(first_head + h) * splits + split", "long(first_head + h) * splits"),
        Mutant("* GROUP;", "* GROUP + 1;"),
    ],
    "fragments": [
        Mutant("return row / 2 + 4 * (row % 2);", "return row;"),
        Mutant("* 2 * Shape::KEY_RUN + row % 2 * Shape::KEY_RUN;", "* 2 * Shape::KEY_RUN;"),
        Mutant("query[c0 + 1] * inverse0", "query[c0 + 1] * inverse1"),
        Mutant("x += simd_shuffle_xor(x, 4);", "x += simd_shuffle_xor(x, 8);"),
        Mutant("minimum1[s] *= scale1;", "minimum1[s] *= scale0;"),
        Mutant("units + (row + 4) * 2", "units + row * 2"),
        Mutant("scales0 = scales0.from(rows);", ""),
        Mutant("words[0].unit_of_both(words[1], b, i)", "words[1].unit_of_both(words[0], b, i)"),
    ],
    "tiles": [
        Mutant("simd_max(as_type<uint>(largest))", "as_type<uint>(largest)"),
        Mutant("metal::max(largest_of(lower[i].minimum(0)), largest_of(upper[i].minimum(0)))", "0.0f"),
        Mutant("of_group.fold(channel + RUN, upper[i]);", "of_group.fold(channel, upper[i]);"),
        Mutant("        share_fold();\n        load_fold();", "        share_fold();"),
        Mutant("metal::min(next_group + 1, last_group)", "metal::min(next_group + 1, last_group - 1)"),
        Mutant("                simdgroup_barrier(mem_flags::mem_threadgroup);  // all", "                // all"),
        Mutant("halves(own.x), halves(own.z)", "halves(own.y), halves(own.z)"),
        Mutant("bias1 = bias[0].thread_elements().y * (unit1", "bias1 = bias[0].thread_elements().y * (unit0"),
        Mutant("as_type<half2>(q.y) * as_type<half2>(s1)", "as_type<half2>(q.y) * as_type<half2>(s0)"),
        Mutant("folded[i - other].thread_elements() - folded[i - 1]", "folded[i - other].thread_elements()); //"),
        Mutant("y -= state.value[n][i - other]", "y += state.value[n][i - other]"),
        Mutant(
            "fragment_of<PLANE, Half8x8>(tile_keys, lower, code + 1)",
            "fragment_of<PLANE, Half8x8>(tile_keys, upper, code + 1)",
        ),
        Mutant("state.sum1 += p1;", "state.sum1 += p0;"),
        Mutant("state.minimum0[set] += p0", "state.minimum0[set] += p1"),
        Mutant("n * Shape::SPAN + place.copy0 == own_group", "place.copy0 == 0"),
        Mutant("        row += ROWS;", ""),
        Mutant("own_keys += ROWS * Keys::WORDS;", ""),
        Mutant("if (TILE_ROWS == ROWS || last_of_group) {", "if (false) {"),
        Mutant("if (MORE && (TILE_ROWS == ROWS || last_of_group)) fold_query();", ""),
        Mutant("probability[Shape::set_of(b, n)][1]", "probability[Shape::set_of(b, n)][0]"),
    ],
    "rows": [
        Mutant("count = row_count - (tiles_end - tiles_begin)", "count = row_count"),
        Mutant("steps * (part + 1) / parts) * STEP, count", "steps * (part + 1) / parts) * STEP - 1, count"),
        Mutant("metal::min(step + i * ROWS + own_row, last - 1)", "metal::min(step + i * ROWS + own_row, last)"),
        Mutant("outside < tiles_begin ? outside", "outside <= tiles_begin ? outside"),
        Mutant("outside + tiles_end - tiles_begin", "outside + tiles_end"),
        Mutant("step + i * ROWS + own_row < last ? product : -INFINITY", "product"),
        Mutant("state.sum[head] *= rescale;", ""),
        Mutant("state.value[head][c] *= rescale;", "{}"),
        Mutant("return simd_sum(x);", "return x;"),
        Mutant("values.load(row, ValueChannels", "values.load(row_of_lane, ValueChannels"),
        Mutant("metal::exp2(maxima[i] - maximum) * sums[i]", "sums[i]"),
        Mutant("value += values[i * STRIDE + c]", "value += values[c]"),
        Mutant("sum > 0 ? maximum + metal::log2(sum)", "sum > 0 ? metal::log2(sum)"),
        Mutant("own_head, row_of_lane, score_of_lane", "own_head, step + lane, score_of_lane"),
        Mutant("own == place * TIMES + i ? product", "own == place * TIMES ? product"),
        Mutant("own_counts && own_head <= place", "own_counts"),
        Mutant("head - place + own_head", "head - place"),
    ],
    "sequence": [
        Mutant("sequence * PLACES", "0"),
        Mutant("to[i + 1] = x.y;\n        }\n    } else", "to[i + 1] = x.x;\n        }\n    } else"),
        Mutant("if (j < count) own[j] = from[j];", "own[j] = from[0];"),
        Mutant("? numbers<T>::upper", "? numbers<T>::lower"),
        Mutant("const device uchar*>(row)[first / N]", "const device uchar*>(row)[0]"),
    ],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_noticed(tools, emulated, name, mutable_texts):
    # Channels and heads of different sizes, keys far from zero in a channel.
    spec = "kivi(bits=2, key_bits=4, group_size=32, residual=32, sinks=2)"
    sizes = np.exp2(np.linspace(-2, 2, 64))
    far = np.where(np.arange(64) == 5, 30.0, 0.0)
    store = tools.filled(spec, [330, 133], 2, 64, 64, mx.float16, spread=sizes, of_keys=far)
    # Heads of different sizes, and scores so far apart that maxima rise on the way. One lane's channels are small ones.
    of_heads, of_channels = [1, 0.3, 2, 0.7, 0.1, 1, 0.5, 3], np.where(np.arange(64) % 32 == 0, 1 / 32, 1)
    queries = tools.queries(2, 8, 64, mx.float16) * mx.array(np.outer(of_heads, of_channels)[:, None], mx.float16)
    truth = tools.oracle(queries, store, 0.4)
    seen = np.isfinite(truth[1])
    # What lies behind a sequence's last row is nobody's.
    one, left_over = tools.queries(1, 1, 64, mx.float32), mx.full((1, 1, 1, 64), float("nan"))
    stale = [tools.filled(of, [41], 1, 64, 64, mx.float32) for of in ("dense", "kivi(bits=2, rollback=1, residual=32)")]
    for each in stale:
        each.append(left_over, left_over)
        each.truncate(1)
    truth_of_stale = [tools.oracle(one, each, 0.1)[0] for each in stale]

    def check():
        with CHECKED.active():
            for splits in (1, 2):
                got = attend(queries, store.layout(), 0.4, logits=True, splits=splits, backend="emulator")
                # Scores of some 50 have rounding errors in half types that the mutants' exceed by far.
                assert tools.error(got.output, truth[0]) < 1e-2  # NaN fails too
                assert np.abs(tools.numbers(got.logits)[seen] - truth[1][seen]).max() < 5e-2
            if name in ("rows", "sequence"):
                for each, true in zip(stale, truth_of_stale, strict=True):
                    assert tools.error(attend(one, each.layout(), 0.1, splits=1, backend="emulator"), true) < 1e-5

    assert surviving_mutants(Kernel(name, PACKAGE, (), ()), MUTANTS[name], check) == []


DENSE_ROWS = [
    Mutant("row < count ?", "row <= count ?"),
    Mutant("sequence * long(threadgroups_per_grid.y) + kv_head", "kv_head"),
    Mutant("newest_key + own_head * KEY_DIM", "newest_key"),
    Mutant("newest_value + own_head * VALUE_DIM", "newest_value"),
    Mutant("kv_head) * place[1] + place[0]", "kv_head) * place[1]"),
    Mutant("kv_head) * place[3] + place[2]", "kv_head) * place[3]"),
]


def test_every_mutant_of_dense_rows_is_noticed(tools, emulated, mutable_texts):
    """The newest rows wait beside the others, as under a policy that drops one at every step."""
    truth_store = tools.filled("dense", [41, 30], 2, 64, 96, mx.float32)
    waiting = tools.filled("dense", [41, 30], 2, 64, 96, mx.float32)
    waiting.accept(AccumulatingPolicy)
    newest = [mx.random.normal((2, 2, 1, dim), key=mx.random.key(dim)) for dim in (64, 96)]
    for store in (truth_store, waiting):
        store.append(*newest, [(0, 1), (0, 1)])
    queries = tools.queries(2, 4, 64, mx.float32)
    truth = tools.oracle(queries, truth_store, 0.2)[0]
    assert waiting.layout().arrays[2] is newest[0]  # not yet among the others

    def check():
        with CHECKED.active():
            assert tools.error(attend(queries, waiting.layout(), 0.2, backend="emulator"), truth) < 1e-5

    assert surviving_mutants(Kernel("dense_rows", "mlx_kv", (), ()), DENSE_ROWS, check) == []


SHARED_ROWS = [
    Mutant("> 64 * lanes", "> 32 * lanes", equivalent="only slower"),
    Mutant("(group > 4 ? group : 4) * value_dim", "group * value_dim"),
    Mutant("return (run * LANES + own) * RUN;", "return run * LANES * RUN + own;"),
    Mutant("mask = 1; mask < LANES", "mask = 2; mask < LANES"),
    Mutant("own_row = lane / LANES", "own_row = lane % ROWS"),
    Mutant("step + own % TIMES * ROWS + own_row < last", "step + own_row < last"),
    Mutant("own % TIMES == i ? row", "i == 0 ? row"),
    Mutant("highest = metal::max(highest, simd_shuffle_xor(highest, mask));", "{}"),
    Mutant("state.sum[h] += simd_shuffle_xor(state.sum[h], mask);", "{}"),
    Mutant("state.sum[h] *= rescale;", ""),
    Mutant("state.value[h][c] *= rescale;", "{}"),
    Mutant("queries[(first_head + h) * QUERY", "queries[h * QUERY"),
    Mutant("state.value[first_head + h][r", "state.value[h][r"),
    Mutant("head % WRITTEN", "h % WRITTEN"),
]
OF_DENSE = [
    Mutant("(simdgroup * (32 / LANES) + lane / LANES) * OF_PART", "simdgroup * (32 / LANES) * OF_PART"),
    Mutant("c / OwnChannels::RUN, lane % LANES) + c %", "c / OwnChannels::RUN, lane) + c %"),
    Mutant("h % 2 * PARTS * OF_PART", "0"),
    Mutant("state.value[h][c] * weight.x", "state.value[h][c]"),
    Mutant("long(first_head + h) * splits + split", "long(first_head + h) * splits"),
]


@pytest.mark.parametrize(("name", "mutants"), [("rows", SHARED_ROWS), ("attend_rows", OF_DENSE)])
def test_every_mutant_of_rows_that_lanes_share_is_noticed(tools, emulated, mutable_texts, name, mutants):
    """Dense rows: lanes with a run and two of channels, more query heads, most channels; and 80, for all lanes."""
    of_channels = np.exp2(np.linspace(-2, 2, 256))
    cases = []
    for group, dim in ((2, 64), (4, 128), (16, 64), (1, 256), (12, 80)):
        store = tools.filled("dense", [77, 45], 2, dim, dim, mx.float32, spread=of_channels[:dim])
        queries = tools.queries(2, 2 * group, dim, mx.float32)
        cases.append((queries, store.layout(), *tools.oracle(queries, store, 0.4)[:2]))

    def check():
        for mode in (CHECKED, Leg("emulator", (("mode", "check"), ("order", 1)))):
            for queries, layout, truth, logits in cases:
                with mode.active():
                    got = attend(queries, layout, 0.4, logits=True, splits=2, backend="emulator")
                assert tools.error(got.output, truth) < 1e-5
                seen = np.isfinite(logits)
                assert np.abs(tools.numbers(got.logits)[seen] - logits[seen]).max() < 1e-3

    assert surviving_mutants(Kernel(name, PACKAGE, (), ()), mutants, check) == []


WAITING = {
    64: [
        Mutant("row < exact_from) r.waits", "row + 1 < exact_from) r.waits"),
        Mutant("row < exact_from) r.waits", "row <= exact_from) r.waits"),
        Mutant("row_count - place[20]", "row_count - place[20] - 1"),
        Mutant("mask < GROUP / N; mask *= 2) extremes", "mask < GROUP / N / 2; mask *= 2) extremes"),
        Mutant("x[j] = scale.read(own.get(j));\n    } else", "x[j] = own.get(j);\n    } else"),
    ],
    96: [
        Mutant("if ((first + j) / GROUP != group) {", "if (group < 0) {"),
        Mutant("c < GROUP; c++) extremes", "c < GROUP - 1; c++) extremes"),
        Mutant("group * GROUP + c", "c"),
    ],
}


@pytest.mark.parametrize("dim", WAITING)
def test_every_mutant_of_values_that_wait_is_noticed(tools, emulated, mutable_texts, dim):
    """A row a lane of which has some of two groups, at 96 channels, and one whose lanes share them evenly."""
    store = tools.filled("kivi(bits=2, residual=32)", [100, 60], 2, dim, dim, mx.float32)
    assert store.rows_wait
    assert store.values.codes.lengths == [65, 25]  # of each 2 wait
    queries = tools.queries(2, 4, dim, mx.float32)
    truth, layout = tools.oracle(queries, store, 0.2)[0], store.layout()

    def check():
        with CHECKED.active():
            assert tools.error(attend(queries, layout, 0.2, backend="emulator"), truth) < 1e-5

    assert surviving_mutants(Kernel("kivi_rows", "mlx_kv_kivi", (), ()), WAITING[dim], check) == []


def test_sinks_that_wait_are_read_exactly(tools, emulated):
    """The first rows of a sequence beside one that has packed rows."""
    store = tools.filled("kivi(bits=2, residual=32, sinks=4)", [100, 37], 2, 64, 64, mx.float32)
    assert store.values.codes.lengths == [65, 2]
    queries = tools.queries(2, 4, 64, mx.float32)
    with CHECKED.active():
        output = attend(queries, store.layout(), 0.2, backend="emulator")
    assert tools.error(output, tools.oracle(queries, store, 0.2)[0]) < 1e-5
