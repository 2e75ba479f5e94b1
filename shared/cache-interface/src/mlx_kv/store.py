"""Stores: how the rows of one layer's keys and values are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import mlx.core as mx

from .layout import Extent, Format, Layout, dense_format, extent
from .rows import ONE_TOKEN, RowBuffer, Span, refuse_others

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from .policy import Policy


@dataclass(frozen=True)
class Geometry:
    """The shape of one layer's attention, as the probe saw it."""

    layer: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    index: int = 0
    """The layer's place among the compressed layers."""
    layers: int = 1
    """Number of compressed layers."""
    model: str = ""
    """The model's fingerprint; empty where there is no model, as in tests of a store."""


class Exchange(NamedTuple):
    """The rows of a store in which the newest is about to take the place of another, as `exchange` describes them."""

    format: Format
    extent: Extent
    """Of the rows once what is overdue has been written."""
    arrays: tuple[mx.array, ...]
    """The layout's, then the keys and values that are overdue and the place of each head [1, kv_heads] they go to."""


class Store(ABC):
    """Holds keys [batch, kv_heads, rows, key_dim] and values [batch, kv_heads, rows, value_dim] of one layer.

    A batch is one store in which every sequence has a length of its own. Rows are exact until `settle` compresses what
    the store's rule says; the cache calls it after the attention of the tokens that were appended, and before whatever
    looks at the store.
    """

    rollback: int | None = 0
    """How many of the newest rows `truncate` can drop exactly; None for any number."""
    in_place: bool = False
    """Whether `dense` shows rows where they lie, for MLX's own attention to read."""
    replaces: bool = False
    """Whether `replace` works: rows may then stand in another order than their tokens'."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Rows held by each sequence; empty before the first append."""

    @abstractmethod
    def append(
        self,
        keys: Float[mx.array, "batch kv_heads chunk key_dim"],
        values: Float[mx.array, "batch kv_heads chunk value_dim"],
        spans: Sequence[Span] | None = None,
    ) -> None:
        """Append a chunk; of sequence b only the rows spans[b][0]..spans[b][1]-1 are real (default: all).

        Raises:
            ValueError: if the rows do not fit those held, of which nothing has changed then.
        """

    @abstractmethod
    def dense(self) -> tuple[mx.array, mx.array]:
        """Return keys and values uncompressed, each sequence from row 0, as long as the longest."""

    @abstractmethod
    def take(self, indices: Int[mx.array, "batch kv_heads kept"], counts: Sequence[int]) -> None:
        """Keep the rows `indices` of each head (ascending), the first counts[b] of them in sequence b."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Drop the newest `rows` rows of every sequence, as if they had never been appended."""

    @abstractmethod
    def buffers(self) -> dict[str, RowBuffer]:
        """Every buffer of the store by name: they are all its arrays."""

    @abstractmethod
    def fresh(self) -> Self:
        """Return an empty store of the same configuration."""

    def layout(self) -> Layout | None:
        """Describe the arrays as they are held; None if attention can only read `dense()`, or there are no rows."""
        return None

    def accept(self, policy: Policy) -> None:  # noqa: B027 (most stores serve any policy)
        """Prepare for the policy that chooses this store's rows.

        Raises:
            ValueError: if the two do not go together.
        """

    def replace(self, sequences: Sequence[int], rows: Int[mx.array, "taken kv_heads"]) -> None:
        """Drop a row of each head in these sequences: their newest, appended just now and alone, takes its place.

        Raises:
            ValueError: if rows of this store cannot change places.
        """
        raise ValueError(f"[{type(self).__name__}] rows cannot change places; use take_from")

    def exchange(self) -> Exchange | None:
        """Describe the rows, for a step that itself writes what is overdue and finds the row of each head to go.

        None unless rows take each other's places, step after step, in the only sequence.
        """
        return None

    def exchanged(self, keys: mx.array, values: mx.array, rows: Int[mx.array, "1 kv_heads"]) -> None:
        """Take over the arrays that such a step has written to, and `replace` these rows."""
        raise ValueError(f"[{type(self).__name__}] rows cannot change places")

    def settle(self) -> None:  # noqa: B027 (most stores have nothing to do)
        """Compress what has become due."""

    def take_from(
        self, sequences: Sequence[int], indices: Int[mx.array, "taken kv_heads kept"], counts: Sequence[int]
    ) -> None:
        """`take` in these sequences alone, one row of `indices` for each; the others stay as they are, bit for bit."""
        batch = len(self.lengths)
        if list(sequences) == list(range(batch)):
            return self.take(indices, counts)
        taken, rest = self.select(sequences), [b for b in range(batch) if b not in sequences]
        taken.take(indices, counts)
        taken.extend(self.select(rest))
        order = [*sequences, *rest]
        merged = taken.select([order.index(b) for b in range(batch)])
        self.load(merged.arrays(), merged.places())
        return None

    def can_truncate(self, rows: int) -> bool:
        """Tell whether `truncate(rows)` would be exact."""
        return self.rollback is None or rows <= self.rollback

    def blank(self, batch: int) -> Self:
        """Return a store of the same configuration with `batch` empty sequences."""
        store = self.fresh()
        for buffer in store.buffers().values():
            buffer.clear(batch)
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences, in this order."""
        chosen = self.fresh()
        for name, buffer in chosen.buffers().items():
            selected = self.buffers()[name].select(sequences)
            buffer.load(selected.data, selected.places)
        return chosen

    def extend(self, other: Any) -> None:
        """Append the sequences of another store of the same class and configuration to the batch."""
        for name, buffer in self.buffers().items():
            buffer.extend(other.buffers()[name])

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by the name of its buffer."""
        return {name: buffer.data for name, buffer in self.buffers().items() if buffer.data is not None}

    def held(self) -> list[mx.array]:
        """Return the arrays held as they are now, which the cache has evaluated with attention's output."""
        return list(self.arrays().values())

    def places(self) -> dict[str, Any]:
        """Everything else that `load` needs, as numbers and lists that JSON can hold."""
        return {name: buffer.places for name, buffer in self.buffers().items()}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over `arrays` and `places` of a store of the same configuration."""
        for name, buffer in self.buffers().items():
            buffer.load(arrays.get(name), places[name])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, room for growth included."""
        return sum(array.nbytes for array in self.arrays().values())


_STEP_AT_A_BUDGET = 32
_ONLY = (0,)

Rows = tuple[mx.array, mx.array]  # keys and values of a token


class DenseStore(Store):
    """Rows in the model's own dtype, as mlx-lm's KVCache holds them.

    Under a policy that drops a row at every step, the newest row waits beside the others until the next one has come:
    only then is it known whose place it takes, and no attention is still reading what is written to.
    """

    rollback = None
    in_place = True
    replaces = True

    def __init__(self, step: int = 256) -> None:
        """Make an empty store that grows by `step` rows."""
        self.keys = RowBuffer(step)
        self.values = RowBuffer(step)
        self._waits = False  # whether a newest row does
        self._newest: Rows | None = None  # a single token's rows, which may replace others
        self._spans: Sequence[Span] = ()  # which of them are in no buffer yet, nor replace a row
        self._replaced: tuple[Sequence[int], mx.array] | None = None  # rows that make way for them
        self._overdue: tuple[Rows, Sequence[int], mx.array] | None = None  # rows before them, to be written over others
        self._steady: tuple[Format, Extent] | None = None  # while each token takes the place of another, and no more
        self._token: tuple[object, ...] = ()  # what the newest token was like

    def __getstate__(self) -> dict[str, Any]:
        """Copies find out anew what dtypes are part of, which cannot be copied, and formats, compared by identity."""
        return {**self.__dict__, "_steady": None, "_token": ()}

    def accept(self, policy: Policy) -> None:
        """Let newest rows wait where a row goes at every step, and grow by few rows: the length then stays."""
        if policy.evicts_every_step:
            self._waits = True
            self.keys.step = self.values.step = _STEP_AT_A_BUDGET

    @property
    def lengths(self) -> list[int]:
        """Rows held by each sequence."""
        if not self._spans:
            return self.keys.lengths
        return [n + last - first for n, (first, last) in zip(self.keys.lengths, self._spans, strict=True)]

    def append(self, keys: mx.array, values: mx.array, spans: Sequence[Span] | None = None) -> None:
        """Append a chunk."""
        spans = whole(keys) if spans is None else spans
        token = keys.shape, values.shape, keys.dtype, values.dtype
        if self._steady and self._newest and self._replaced and self._token == token:
            self._overdue = (self._newest, *self._replaced)
            self._newest, self._spans, self._replaced = (keys, values), spans, None
            return
        if token != self._token:
            for data, rows in ((self.keys.data, keys), (self.values.data, values)):
                refuse_others(None if data is None else (data.shape[1], data.shape[3]), rows)
        self._write_overdue()
        self._turn()
        if keys.shape[2] > 1:
            self._write_overdue()
        else:
            self._newest, self._token = (keys, values), token
            if self._waits:
                self._spans = spans
                counts = [last - first for first, last in spans]
                held = [
                    buffer.reserve(counts, rows.shape[1], rows.shape[3], rows.dtype)
                    for buffer, rows in ((self.keys, keys), (self.values, values))
                ]
                if (keys.dtype, values.dtype) != (held[0].dtype, held[1].dtype):
                    self._newest, self._token = (keys.astype(held[0].dtype), values.astype(held[1].dtype)), ()
                return
        self.keys.append(keys, spans)
        self.values.append(values, spans)

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return the rows held."""
        self._write_overdue()
        self._write_newest()
        return self.keys.view(), self.values.view()

    def layout(self) -> Layout | None:
        """Describe the two arrays, and the row of each sequence that is in none of them yet."""
        self._write_overdue()
        keys, values = self.keys.data, self.values.data
        if keys is None or values is None or not any(self.lengths):
            return None
        format, rows = self._described(keys, values)
        newest = self._newest if self._spans and self._newest else (keys, values)
        return Layout(format, (keys, values, *newest), rows, self.dense)

    def exchange(self) -> Exchange | None:
        """Describe the rows of one sequence whose newest row, and the one before, take the places of others."""
        keys, values, newest = self.keys.data, self.values.data, self._newest
        if self._overdue is None or self._spans != ONE_TOKEN or keys is None or values is None or newest is None:
            return None
        if self._steady is None:
            if self.keys.begins[0]:
                return None
            self._steady = self._described(keys, values)
        last, _, places = self._overdue
        return Exchange(*self._steady, (keys, values, *newest, *last, places))

    def exchanged(self, keys: mx.array, values: mx.array, rows: mx.array) -> None:
        """Take the arrays over, and drop a row of each head."""
        self.keys.data, self.values.data, self._overdue = keys, values, None
        self.replace(_ONLY, rows)

    def _described(self, keys: mx.array, values: mx.array) -> tuple[Format, Extent]:
        (_, heads, of_keys, key_dim), (_, _, of_values, value_dim) = keys.shape, values.shape
        begins = zip(self.keys.lengths, self.keys.begins, self.values.begins, strict=True)
        places = tuple([(key, of_keys, value, of_values, held) for held, key, value in begins])
        return dense_format(heads, key_dim, value_dim, keys.dtype), extent(tuple(self.lengths), places)

    def take(self, indices: mx.array, counts: Sequence[int]) -> None:
        """Keep a subset of the rows."""
        self.settle()
        self.keys.take(indices, counts)
        self.values.take(indices, counts)

    def replace(self, sequences: Sequence[int], rows: mx.array) -> None:
        """Drop a row of each head; the newest is written over it once the next one has come.

        Attention may still be reading the arrays now: MLX would copy them whole.
        """
        if self._spans:
            self._spans = [(0, 0) if b in sequences else span for b, span in enumerate(self._spans)]
        else:  # it has been written behind the others
            if self._newest is None:
                last = [(max(n - 1, 0), n) for n in self.lengths]
                self._newest = self.keys.part(last), self.values.part(last)
            dropped = [int(b in sequences) for b in range(len(self.lengths))]
            self.keys.drop_back(dropped)
            self.values.drop_back(dropped)
        self._replaced = sequences, rows

    def settle(self) -> None:
        """Write what waits: over the rows that it replaces, else behind the others."""
        self._write_overdue()
        self._turn()
        self._write_overdue()

    def _turn(self) -> None:
        """Let the newest rows be older ones: behind the others, or overdue."""
        if self._newest is not None and self._replaced is not None:
            self._overdue = (self._newest, *self._replaced)
        self._write_newest()
        self._newest = self._replaced = None

    def _write_newest(self) -> None:
        """Append what waits behind the others."""
        if self._newest is not None and self._spans:
            for buffer, rows in zip((self.keys, self.values), self._newest, strict=True):
                buffer.append(rows, self._spans)
        self._spans = ()

    def _write_overdue(self) -> None:
        """Write rows over those that they replace."""
        if self._overdue is not None:
            newest, sequences, places = self._overdue
            for buffer, rows in zip((self.keys, self.values), newest, strict=True):
                buffer.put(sequences, places, rows)
            self._overdue = self._steady = None

    def truncate(self, rows: int) -> None:
        """Drop the newest rows."""
        self.settle()
        counts = [min(rows, length) for length in self.lengths]
        self.keys.drop_back(counts)
        self.values.drop_back(counts)

    def buffers(self) -> dict[str, RowBuffer]:
        """The two buffers."""
        return {"keys": self.keys, "values": self.values}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another store's arrays and places; nothing waits then."""
        self._newest = self._replaced = self._overdue = self._steady = None
        self._spans, self._token = (), ()
        super().load(arrays, places)

    def fresh(self) -> Self:
        """Return an empty dense store."""
        store = type(self)(self.keys.step)
        store._waits = self._waits
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences."""
        self.settle()
        return super().select(sequences)


@dataclass(frozen=True)
class Dense:
    """Keep keys and values uncompressed: the store to put an evicting policy on."""

    kind: ClassVar[str] = "store"

    def create(self, geometry: Geometry) -> DenseStore:
        """Make the store of one layer; any geometry will do."""
        return DenseStore()


def whole(chunk: mx.array) -> list[Span]:
    """Return the spans of a chunk [batch, heads, rows, width] without padding."""
    return [(0, chunk.shape[2])] * chunk.shape[0]
