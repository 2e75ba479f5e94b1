"""What mlx-kv itself provides, under the checks that every method passes, and what the checks say of a broken one."""

import dataclasses

import mlx.core as mx
import pytest

from mlx_kv import CompressedKVCache, DenseStore
from mlx_kv.testing import CHECKS, ConformanceError, check_name, driving
from mlx_kv.testing.batches import check_merged_sequences
from mlx_kv.testing.copies import check_copies_are_independent, check_five_reloads, check_trim, check_trimmable
from mlx_kv.testing.machine import cache_machine, exact
from mlx_kv.testing.memory import check_chunking_does_not_matter, check_memory_is_flat, check_nbytes
from mlx_kv.testing.surface import check_attention, check_attributes, check_caches_share_nothing, check_counters


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_dense(check):
    check("dense")


TestDenseCaches = cache_machine({"dense": exact}, max_examples=50).TestCase


class _Rounding(DenseStore):
    """Rounds each chunk by its own range: codes hang on the chunks."""

    def append(self, keys, values, spans=None):
        step = mx.abs(keys).max() / 7
        super().append(mx.round(keys / step) * step, values, spans)


class _Hoarding(DenseStore):
    """Keeps every chunk beside the rows, and does not count it."""

    def __init__(self):
        super().__init__()
        self.hoard = []

    def fresh(self):
        return type(self)()

    def append(self, keys, values, spans=None):
        self.hoard.append(keys)
        super().append(keys, values, spans)


class _Forgetful(DenseStore):
    """Cannot take rows back, but says it can."""

    def truncate(self, rows):
        self.keys.drop_back([max(rows - 1, 0)] * len(self.lengths))
        self.values.drop_back([max(rows - 1, 0)] * len(self.lengths))


class _Shared(DenseStore):
    """Holds the rows of all caches in one place."""

    common = DenseStore()

    def __init__(self):
        super().__init__()
        self.keys, self.values = self.common.keys, self.common.values


class _Swapping(DenseStore):
    """Mixes up the sequences of a batch."""

    def select(self, sequences):
        return super().select(sequences[::-1])

    def extend(self, other):
        other = other.select(range(len(other.lengths)))
        keys = mx.roll(other.keys.data, 1, axis=2) if other.keys.data is not None else None
        other.keys.data = keys
        super().extend(other)


class _Lossy(DenseStore):
    """Loses a little at each save."""

    def arrays(self):
        return {name: array * 0.999 for name, array in super().arrays().items()}


@pytest.fixture
def broken(add_method):
    """Register a store class as the method `broken`."""

    def register(store):
        @dataclasses.dataclass(frozen=True)
        class Broken:
            kind = "store"

            def create(self, geometry):
                return store()

        add_method("broken", Broken)
        return "broken"

    return register


@pytest.mark.parametrize(
    ("store", "check", "message"),
    [
        (_Rounding, check_chunking_does_not_matter, r"rows holds other \['keys'\] than at once"),
        (_Hoarding, check_nbytes, r"nbytes says \d+, the arrays that the cache reaches hold \d+"),
        (_Forgetful, check_trim, r"the keys differ from those of a cache that never saw the"),
        (_Shared, check_caches_share_nothing, r"a cache answers differently after another one was fed"),
        (_Swapping, check_merged_sequences, r"is answered with an error of"),
        (_Lossy, check_five_reloads, r"reload 1 changed the arrays held"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_store_is_caught_by_name(broken, store, check, message):
    with pytest.raises(ConformanceError, match=message) as caught:
        check(broken(store))
    assert str(caught.value).startswith("[broken] ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "check", "message"),
    [
        ("bits", 2, check_attributes, "must not have bits: mlx-lm would route"),
        ("__len__", lambda self: 0, check_attributes, "must not have __len__"),
        ("offset", property(lambda self: sum(self.store.lengths) // 2), check_counters, "offset must count"),
        ("is_trimmable", lambda self: False, check_trimmable, r"is_trimmable\(\) of an empty cache must be True"),
        ("from_state", classmethod(lambda cls, state: driving.new_cache("dense")), check_copies_are_independent, "on"),
        ("_rows_mask", lambda self, mask, chunk: None, check_attention, "is attended to with error"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_broken_cache_is_caught_by_name(monkeypatch, name, value, check, message):
    monkeypatch.setattr(CompressedKVCache, name, value, raising=False)
    with pytest.raises(ConformanceError, match=message):
        check("dense")


def _evaluated_sum(output):
    total = mx.sum(output)
    mx.eval(total)
    return total


def _keep_at_each_step(monkeypatch, kept_of):
    kept = []
    answer = CompressedKVCache.attend

    def attend(self, queries, *rest):
        output = answer(self, queries, *rest)
        kept.append(kept_of(output))
        return output

    monkeypatch.setattr(CompressedKVCache, "attend", attend)


def test_a_graph_kept_alive_is_caught(monkeypatch):
    _keep_at_each_step(monkeypatch, lambda output: output + 1)
    with pytest.raises(ConformanceError, match="bytes behind beside the arrays held"):
        check_memory_is_flat("dense")


def test_a_number_kept_at_each_step_is_caught(monkeypatch):
    """500 numbers take less than the pages that may come and go; that they only ever grow gives them away."""
    _keep_at_each_step(monkeypatch, _evaluated_sum)
    with pytest.raises(ConformanceError, match="grew all the way"):
        check_memory_is_flat("dense")
