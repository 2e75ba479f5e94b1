"""Rows in the model's own dtype: the store to put an evicting policy on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import mlx.core as mx

from .layout import Extent, Format, Layout, dense_format, exchanged_format, extent
from .overdue import MOST, Overdue
from .rows import ONE_TOKEN, RowBuffer, Span, refuse_others
from .store import Exchange, Store, whole

if TYPE_CHECKING:
    from .policy import Policy
    from .store import Geometry

_STEP_AT_A_BUDGET = 32

Rows = tuple[mx.array, mx.array]  # keys and values of a token


class DenseStore(Store):
    """Rows in the model's own dtype, as mlx-lm's KVCache holds them.

    Under a policy that drops a row at every step, the newest row waits beside the others until the next one has come:
    only then is it known whose place it takes, and no attention is still reading what is written to. While steps of
    one sequence go through `exchange`, rows wait together.
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
        self._exchanged: Overdue | None = None  # or several such rows
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
        if len(self._spans) == 1:  # asked for several times at every step
            ((first, last),) = self._spans
            return [self.keys.ends[0] - self.keys.begins[0] + last - first]
        return [n + last - first for n, (first, last) in zip(self.keys.lengths, self._spans, strict=True)]

    def append(self, keys: mx.array, values: mx.array, spans: Sequence[Span] | None = None) -> None:
        """Append a chunk."""
        spans = whole(keys) if spans is None else spans
        token = keys.shape, values.shape, keys.dtype, values.dtype
        if self._steady and self._newest is None and self._token == token:
            self._newest, self._spans = (keys, values), spans
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
        newest = self._newest if self._spans and self._newest else (keys, values)
        format = dense_format(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return Layout(format, (keys, values, *newest), self._extent(keys, values), self.dense)

    def exchange(self, most: int) -> Exchange | None:
        """Describe the rows of one sequence, those overdue apart."""
        newest = self._newest
        if self._spans != ONE_TOKEN or newest is None or self.keys.begins[0]:
            return None
        if self._exchanged is None or self._exchanged.count >= min(most, MOST):
            self._write_overdue()
        keys, values = self.keys.data, self.values.data
        if keys is None or values is None or keys.dtype != values.dtype:
            return None
        overdue = self._exchanged
        if self._steady is None or overdue is None:
            format = exchanged_format(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            self._steady = format, self._extent(keys, values)
            overdue = self._exchanged = Overdue.none(keys, values)
        return Exchange(*self._steady, (keys, values, *newest, overdue.rows, overdue.taken))

    def exchanged(self, overdue: mx.array, taken: mx.array) -> None:
        """Take over the overdue rows and their places, the newest now the last of them."""
        count = self._exchanged.count if self._exchanged else 0
        self._exchanged, self._newest, self._spans = Overdue(overdue, taken, count + 1), None, ()

    def _extent(self, keys: mx.array, values: mx.array) -> Extent:
        begins = zip(self.keys.lengths, self.keys.begins, self.values.begins, strict=True)
        of_keys, of_values = keys.shape[2], values.shape[2]
        places = tuple([(key, of_keys, value, of_values, held) for held, key, value in begins])
        return extent(tuple(self.lengths), places)

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
            self._overdue = None
        if self._exchanged and self.keys.data is not None and self.values.data is not None:
            self.keys.data, self.values.data = self._exchanged.written(self.keys.data, self.values.data)
        self._exchanged = self._steady = None

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
        self._newest = self._replaced = self._overdue = self._exchanged = self._steady = None
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
