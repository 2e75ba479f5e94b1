"""Stores: how the rows of one layer's keys and values are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import mlx.core as mx

from .layout import Extent, Format, Layout
from .rows import RowBuffer, Span

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt32

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
    arrays: tuple[mx.array, ...]
    """Keys, values, the newest of both, and the overdue rows, which have taken places but not been written there yet.

    The latter are [1, kv_heads, 32, key_dim + value_dim]; then the places they take [33, kv_heads], of which the last
    tells instead how many they are.
    """


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
        """Every buffer of the store by name: they are all its arrays. What waits is in none until `settle`."""

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

    def exchange(self, most: int) -> Exchange | None:
        """Describe the rows, for a step that finds the row of each head whose place the newest one takes.

        Fewer than `most` rows are overdue then, none at all if it is 0 or 1: those that never go, being so new, since a
        place cannot be taken twice. None where such steps are not for this store.
        """
        return None

    def exchanged(self, overdue: mx.array, taken: UInt32[mx.array, "33 kv_heads"]) -> None:
        """Take over the overdue rows and their places, the newest now the last of them."""
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


def whole(chunk: mx.array) -> list[Span]:
    """Return the spans of a chunk [batch, heads, rows, width] without padding."""
    return [(0, chunk.shape[2])] * chunk.shape[0]
