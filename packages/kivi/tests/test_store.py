"""What a KIVI store holds: which rows exactly, and how many bytes."""

import gc
import json
import pickle
from copy import deepcopy
from pathlib import Path

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given, settings

from mlx_kv import Policy
from mlx_kv.testing.driving import contents, random_tokens, reachable_arrays, same_bits
from mlx_kv_kernels.testing import legs
from mlx_kv_kivi import Kivi, KiviStore
from mlx_kv_kivi.packed import Quantizer

BACKENDS = ["reference", *sorted({leg.backend for leg in legs()})]  # those that run here
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["kivi_bytes"]


def filled(config, n, heads=1, dim=64, dtype=mx.float16, chunk=None):
    """Return a store that n random rows were appended to."""
    store = KiviStore(config)
    keys, values = (mx.random.normal((1, heads, n, dim), dtype, key=mx.random.key(i)) for i in (1, 2))
    for start in range(0, n, chunk or n):
        rows = slice(start, start + (chunk or n))
        store.append(keys[:, :, rows], values[:, :, rows])
        store.settle()
        mx.eval(store.arrays())
    return store


def formula(config, n, heads, dim):
    """Bytes of n rows: methods' text, at two bytes for a number in full precision."""
    reach, group = config.rollback, config.group_size
    packed_keys = config.residual * (max(0, n - reach) // config.residual)
    packed_values = max(0, n - reach - config.residual)
    total = 0
    for packed, bits in ((packed_keys, config.bits_of_keys), (packed_values, config.bits_of_values)):
        total += packed * dim * heads * bits // 8 + packed * dim * heads * 4 // group
        total += (n - packed + min(packed, config.sinks)) * dim * heads * 2
    return total


@pytest.mark.parametrize("reach", [0, 1, 40])
@pytest.mark.parametrize("residual", [32, 64])
def test_the_newest_rows_are_exact_at_every_length(residual, reach):
    """K: what is left of the last block; V: the newest `residual`; both: `rollback` more, and the sinks."""
    config = Kivi(residual=residual, rollback=reach, sinks=3)
    store, tokens = KiviStore(config), random_tokens(0, 200)
    for n in range(1, 201):
        store.append(tokens.keys[:, :, n - 1 : n], tokens.values[:, :, n - 1 : n])
        store.settle()
        keys, values = store.dense()
        packed_keys, packed_values = residual * (max(0, n - reach) // residual), max(0, n - reach - residual)
        for read, exact, packed in ((keys, tokens.keys, packed_keys), (values, tokens.values, packed_values)):
            assert read.shape[2] == n
            assert same_bits(read[:, :, packed:], exact[:, :, packed:n])
            assert same_bits(read[:, :, : min(3, n)], exact[:, :, : min(3, n)])
            rounded = mx.abs(read - exact[:, :, :n])[:, :, 3:packed].max(axis=(0, 1, 3))
            assert (rounded > 0).all()  # and no other row is held beside its codes


@settings(max_examples=60, deadline=None)
@given(
    key_bits=st.sampled_from([2, 3, 4, 8]),
    value_bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([32, 64]),
    blocks=st.integers(1, 3),
    reach=st.sampled_from([0, 5, 100]),
    n=st.integers(1, 900),
    chunk=st.sampled_from([None, 1000, 77]),
)
def test_bytes_follow_the_formula(key_bits, value_bits, group_size, blocks, reach, n, chunk):
    residual = blocks * group_size
    config = Kivi(
        key_bits=key_bits, value_bits=value_bits, group_size=group_size, residual=residual, sinks=0, rollback=reach
    )
    store = filled(config, n, chunk=chunk)
    right = formula(config, n, heads=1, dim=64)
    rows = sum(map(len, contents(store)[0].values()))
    # With rollback the tail also keeps the rows that taking tokens back may have to unpack: whole blocks of keys.
    again = -(-reach // residual) * residual + reach
    assert right <= rows <= right + again * 64 * 2
    growth = sum(
        buffer.step * buffer.data.nbytes // buffer.data.shape[2]
        for buffer in store.buffers().values()
        if buffer.data is not None
    )
    assert rows <= store.nbytes <= rows + 2 * growth  # a tail slides by up to a step before it moves


def test_bytes_of_a_real_layer():
    """8 KV heads of 128, 4096 tokens, 2 bit: 3,358,720 bytes, 4.995 times below fp16."""
    case, right = GOLDEN["inputs"], int(GOLDEN["expected"]["bytes"])
    config = Kivi(bits=case["bits"], group_size=case["group_size"], residual=case["residual_length"], sinks=0)
    n, heads, dim = case["T"], case["kv_heads"], case["head_dim"]
    assert formula(config, n, heads, dim) == right
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    store = filled(config, n, heads, dim)
    gc.collect()
    allocated = mx.get_active_memory() - before
    # One step of growth: 256 packed rows of K and V, 64 full-precision ones.
    step = 256 * heads * dim * (2 / 8 + 4 / 32) * 2 + 64 * heads * dim * 2 * 2
    assert right <= store.nbytes <= right + step
    assert store.nbytes == sum(array.nbytes for array in reachable_arrays(store))
    assert abs(allocated - store.nbytes) <= 0.05 * store.nbytes
    assert GOLDEN["expected"]["fp16_bytes"] / right == pytest.approx(GOLDEN["expected"]["ratio"], abs=1e-4)


def append(store, tokens):
    store.append(tokens.keys, tokens.values)


BETWEEN = {
    "nothing": lambda store: store,
    "settle": lambda store: store.settle(),
    "dense": lambda store: mx.eval(store.dense()),
    "its bytes": lambda store: store.nbytes,
    "truncate": lambda store: store.truncate(0),
    "a chunk": lambda store: append(store, random_tokens(1, 3)),
    "load": lambda store: store.load(store.arrays(), store.places()),
}


@settings(max_examples=40, deadline=None)
@given(
    residual=st.sampled_from([32, 64]),
    rollback=st.sampled_from([0, 3]),
    between=st.lists(st.tuples(st.sampled_from(sorted(BETWEEN)), st.integers(1, 70)), min_size=1, max_size=6),
)
def test_values_that_wait_are_read_and_held_as_if_they_were_packed(residual, rollback, between):
    """Beside a store in which none ever waits, whatever happens between tokens."""
    config = Kivi(residual=residual, rollback=rollback)
    store, never = KiviStore(config), KiviStore(config)
    for each in (store, never):
        append(each, random_tokens(0, 100))
        append(each, random_tokens(1, 1))
    for seed, (name, tokens) in enumerate(between):
        for token in range(tokens):
            new = random_tokens(100 * seed + token, 1)
            append(store, new)
            never._tokens_left = 0
            append(never, new)
            assert not never.rows_wait
            exact, right = (each.layout().extent.places[0][-1] for each in (store, never))
            assert exact == right  # as many of the newest rows are read exactly
        assert all(map(same_bits, deepcopy(store).dense(), never.dense()))
        for each in (store, never):
            BETWEEN[name](each)
        assert store.lengths == never.lengths
    assert all(map(same_bits, store.dense(), never.dense()))
    for each in (store, never):
        each.settle()
    assert contents(store) == contents(never)


def test_reading_rows_of_which_none_waits_changes_nothing():
    """So that short prompts, whose rows MLX's own attention reads, are appended to as fast as packed ones."""
    store = KiviStore(Kivi(residual=128))
    append(store, random_tokens(0, 10))
    append(store, random_tokens(1, 1))
    left = store._tokens_left
    for seed in range(2, 12):
        append(store, random_tokens(seed, 1))
        store.dense()
    assert store._tokens_left == left - 10


def test_a_layout_of_the_token_before_is_not_told_of_a_moved_tail():
    """Between two tokens of a run everything but the number of rows stays where it was."""
    store = KiviStore(Kivi(residual=32))
    append(store, random_tokens(0, 100))
    for seed in range(1, 150):
        append(store, random_tokens(seed, 1))
        layout, described = store.layout(), store.describe()
        assert layout.extent is described.extent
        assert all(a is b for a, b in zip(layout.arrays, described.arrays, strict=False))
        assert layout.arrays[-2:] == (store.keys.tail.data, store.values.tail.data)


@pytest.mark.parametrize("look", ["settle", "dense"])
def test_packing_that_fails_leaves_the_rows_as_they_were(monkeypatch, look):
    """They are packed the next time, and until then those that wait are still read as packed ones."""
    store = KiviStore(Kivi(residual=32))
    append(store, random_tokens(0, 100))
    for seed in range(1, 6):  # the prompt's are packed with the first, the others wait
        append(store, random_tokens(seed, 1))
    right, places = deepcopy(store), store.layout().extent.places
    assert store.rows_wait

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Quantizer, "__call__", fails)
        with pytest.raises(KeyboardInterrupt):
            getattr(store, look)()
    assert store.layout().extent.places == places
    for each in (store, right):
        getattr(each, look)()
    assert contents(store) == contents(right)


@pytest.mark.parametrize(
    ("keys", "values", "spans"),
    [((1, 2, 3), (1, 2, 2), None), ((1, 2, 1), (1, 2, 1), None), ((2, 2, 1), (2, 2, 1), [(0, 1)])],
    ids=["rows", "sequences", "spans"],
)
def test_a_chunk_that_does_not_fit_changes_nothing(keys, values, spans):
    store = KiviStore(Kivi(residual=32))
    for n in (50, 1):
        store.append(mx.ones((2, 2, n, 64)), mx.ones((2, 2, n, 64)))
    before = contents(deepcopy(store))
    with pytest.raises(ValueError, match=r"\[mlx_kv\] expected keys and values of 2 sequences"):
        store.append(mx.ones((*keys, 64)), mx.ones((*values, 64)), spans)
    assert contents(store) == before


def test_spans_that_their_owner_changes_are_new_ones():
    store, spans, rows = KiviStore(Kivi(residual=32)), [(0, 1), (0, 1)], mx.ones((2, 2, 1, 64))
    store.append(mx.ones((2, 2, 50, 64)), mx.ones((2, 2, 50, 64)))
    store.append(rows, rows, spans)
    spans[1] = (0, 0)
    store.append(rows, rows, spans)
    assert store.lengths == [52, 51]
    assert store.dense()[0].shape[2] == 52


def test_packed_rows_are_not_copied_per_token():
    """A step of one token allocates a small part of what the store holds: its tails, which do not grow, are copied."""
    store = filled(Kivi(residual=32), 16384 + 100, heads=2, chunk=2048)
    token = mx.random.normal((1, 2, 1, 64), mx.float16)
    coded = [buffer for side in (store.keys, store.values) for buffer, _ in side.coded()]
    held = store.keys.codes.data.nbytes
    for _ in range(100):
        mx.eval(token)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        limits = [buffer.limits for buffer in coded]
        store.append(token, token)
        mx.eval(store.layout().arrays)
        if limits == [buffer.limits for buffer in coded]:  # else a step of growth has moved the rows
            assert mx.get_peak_memory() - before < held / 4


@pytest.mark.parametrize("spec", [Kivi(residual=32), Kivi(residual=32, sinks=0, rollback=20)])
def test_a_subset_of_the_rows_is_quantised_as_if_it_were_all(spec):
    """What eviction leaves: the rows kept, read back and appended to a new store."""
    store = filled(spec, 200, heads=2)
    keys, values = store.dense()
    chosen = mx.array([[sorted({*range(h, 200, 3)})[:60] for h in range(2)]])
    store.take(chosen, [60])
    fresh = KiviStore(spec)
    fresh.append(*(mx.take_along_axis(rows, chosen[..., None], axis=2) for rows in (keys, values)))
    fresh.settle()
    assert contents(store) == contents(fresh)


def test_deferring_reads_nothing_quantised_during_a_prompt():
    tokens = random_tokens(0, 400)
    store = KiviStore(Kivi(residual=32, defer=True))
    for start in range(0, 400, 100):
        store.append(tokens.keys[:, :, start : start + 100], tokens.values[:, :, start : start + 100])
        store.settle()
        for read, exact in zip(store.dense(), (tokens.keys, tokens.values), strict=True):
            assert same_bits(read, exact[:, :, : start + 100])
    full = store.nbytes
    store.append(tokens.keys[:, :, :1], tokens.values[:, :, :1])
    store.settle()
    assert store.nbytes < full / 2


def test_a_policy_that_drops_a_row_at_every_step_is_refused():
    class OneByOne(Policy):
        evicts = evicts_while_decoding = evicts_every_step = True

    store = KiviStore()
    with pytest.raises(ValueError, match=r"\[kivi\] expected a policy that drops rows when a prompt ends"):
        store.accept(OneByOne())


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_around_a_single_token_is_not_taken_for_it(backend, monkeypatch):
    monkeypatch.setenv("MLX_KV_BACKEND", backend)
    tokens = random_tokens(0, 60)
    store, expected = KiviStore(Kivi(residual=32)), KiviStore(Kivi(residual=32))
    for each in (store, expected):
        each.append(tokens.keys[:, :, :50], tokens.values[:, :, :50])
    store.append(tokens.keys[:, :, 50:55], tokens.values[:, :, 50:55], [(0, 1)])
    expected.append(tokens.keys[:, :, 50:51], tokens.values[:, :, 50:51])
    assert all(same_bits(*pair) for pair in zip(store.dense(), expected.dense(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 4, 1, 64), (1, 1, 1, 64), (1, 2, 1, 32)])
def test_rows_of_other_heads_or_channels_are_refused(shape, backend, monkeypatch):
    monkeypatch.setenv("MLX_KV_BACKEND", backend)
    store = filled(Kivi(residual=32), 50, heads=2)
    before = contents(store)
    with pytest.raises(ValueError, match=r"\[mlx_kv\] expected rows of 2 heads and 64 channels"):
        store.append(mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16))
    assert contents(store) == before


@pytest.mark.parametrize("shape", [(1, 4, 1, 64), (1, 2, 1, 128)])
def test_rows_of_other_heads_or_channels_are_refused_where_all_are_packed(shape):
    store = filled(Kivi(residual=32, sinks=0), 160, heads=2)
    assert store.keys.tail.data is None
    assert store.keys.exact.data is None
    with pytest.raises(ValueError, match=r"\[mlx_kv\] expected rows of 2 heads and 64 channels"):
        store.append(mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16))
    other = filled(Kivi(residual=32, sinks=0), 160, dim=128)
    store.load(other.arrays(), other.places())
    store.append(mx.zeros((1, 1, 1, 128), mx.float16), mx.zeros((1, 1, 1, 128), mx.float16))
    assert store.lengths == [161]


def test_a_store_can_be_pickled():
    store = filled(Kivi(residual=32), 100, heads=2)
    assert contents(pickle.loads(pickle.dumps(store))) == contents(store)
