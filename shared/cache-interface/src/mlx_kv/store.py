"""Stores: how the rows of one layer's keys and values are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import mlx.core as mx

from .layout import Layout, dense_format, extent
from .rows import RowBuffer, Span

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
        """Append a chunk; of sequence b only the rows spans[b][0]..spans[b][1]-1 are real (default: all)."""

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


class DenseStore(Store):
    """Rows in the model's own dtype, as mlx-lm's KVCache holds them.

    Under a policy that drops a row at every step, the newest row waits beside the others until the next one comes: only
    then is it known whose place it takes, and it is written once.
    """

    rollback = None
    in_place = True
    replaces = True

    def __init__(self, step: int = 256) -> None:
        """Make an empty store that grows by `step` rows."""
        self.keys = RowBuffer(step)
        self.values = RowBuffer(step)
        self._waits = False  # whether a newest row does
        self._newest: tuple[mx.array, mx.array] | None = None  # a single token's rows, which may replace others
        self._spans: Sequence[Span] = ()  # which of them are in no buffer yet, nor replace a row
        self._replaced: tuple[Sequence[int], mx.array] | None = None  # rows that make way

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
        if self._newest is not None:
            self.settle()
        spans = whole(keys) if spans is None else spans
        if keys.shape[2] == 1:
            self._newest = keys, values
            if self._waits:
                self._spans = spans
                counts = [last - first for first, last in spans]
                for buffer, rows in ((self.keys, keys), (self.values, values)):
                    buffer.reserve(counts, rows.shape[1], rows.shape[3], rows.dtype)
                return
        self.keys.append(keys, spans)
        self.values.append(values, spans)

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return the rows held."""
        if self._spans:
            self._write()
        return self.keys.view(), self.values.view()

    def layout(self) -> Layout | None:
        """Describe the two arrays, and the row of each sequence that is in none of them yet."""
        keys, values, rows = self.keys.data, self.values.data, tuple(self.lengths)
        if keys is None or values is None or not any(rows):
            return None
        newest = self._newest if self._spans and self._newest else (keys, values)
        (_, heads, of_keys, key_dim), (_, _, of_values, value_dim) = keys.shape, values.shape
        format = dense_format(heads, key_dim, value_dim, keys.dtype)
        begins = zip(self.keys.lengths, self.keys.begins, self.values.begins, strict=True)
        places = tuple([(key, of_keys, value, of_values, held) for held, key, value in begins])
        return Layout(format, (keys, values, *newest), extent(rows, places), self.dense)

    def take(self, indices: mx.array, counts: Sequence[int]) -> None:
        """Keep a subset of the rows."""
        self.settle()
        self.keys.take(indices, counts)
        self.values.take(indices, counts)

    def replace(self, sequences: Sequence[int], rows: mx.array) -> None:
        """Drop a row of each head; the newest is written over it when the store settles.

        Attention may still be reading the arrays now: MLX would copy them whole.
        """
        if self._spans:
            self._spans = [(0, 0) if b in sequences else span for b, span in enumerate(self._spans)]
        else:  # it has been written behind the others
            dropped = [int(b in sequences) for b in range(len(self.lengths))]
            self.keys.drop_back(dropped)
            self.values.drop_back(dropped)
        self._replaced = sequences, rows

    def settle(self) -> None:
        """Write the newest row: over the one that it replaces, else behind the others."""
        if self._newest is None:
            return
        if self._replaced is not None:
            sequences, places = self._replaced
            for buffer, rows in zip((self.keys, self.values), self._newest, strict=True):
                buffer.put(sequences, places, rows)
        self._write()
        self._newest = self._replaced = None

    def truncate(self, rows: int) -> None:
        """Drop the newest rows."""
        self.settle()
        counts = [min(rows, length) for length in self.lengths]
        self.keys.drop_back(counts)
        self.values.drop_back(counts)

    def buffers(self) -> dict[str, RowBuffer]:
        """The two buffers."""
        return {"keys": self.keys, "values": self.values}

    def fresh(self) -> Self:
        """Return an empty dense store."""
        store = type(self)(self.keys.step)
        store._waits = self._waits
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences."""
        self.settle()
        return super().select(sequences)

    def _write(self) -> None:
        """Append what waits behind the others."""
        if self._newest is not None and self._spans:
            for buffer, rows in zip((self.keys, self.values), self._newest, strict=True):
                buffer.append(rows, self._spans)
        self._spans = ()


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
