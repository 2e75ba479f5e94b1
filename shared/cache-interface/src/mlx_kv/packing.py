"""Stores that pack rows as these leave the newest ones, which stay in full precision: what KIVI and RVQ share."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import mlx.core as mx

from mlx_kv_kernels import gather_rows

from .layout import Layout, input_array, next_extent
from .packed_side import PackedSide
from .rows import RowBuffer, Span
from .store import Store, whole

if TYPE_CHECKING:
    from jaxtyping import Float, Int

WAITING = 32
"""Rows of a side that may wait to be packed while single tokens come, where attention reads them as if they were."""


Side = TypeVar("Side", bound=PackedSide)


class PackedStore(Store, Generic[Side]):
    """A store of two packed sides; a method's store says how many rows are packed, and how.

    While single tokens come, rows that have become due may wait: `packed` of the rows before the newest token says
    which count as packed. A token then costs the host two writes to the tails, and a layout that differs from the last
    one by a row.
    """

    def __init__(self, keys: Side, values: Side, rollback: int, defer: bool) -> None:
        """Make an empty store.

        Args:
            keys: an empty side.
            values: an empty side.
            rollback: newest tokens that can be taken back exactly.
            defer: pack nothing of a prompt before it has ended.
        """
        self.keys, self.values = keys, values
        self.rollback = self._rollback = rollback  # the second is never None
        self.defer = defer
        self._rows: list[int] = []
        self._most: list[int] = []  # rows that each sequence has had at most: `truncate` reaches back from there
        self._in_prompt: list[bool] = []  # whether each sequence's newest tokens came as a prompt
        self._token: tuple[object, ...] = ()  # what the newest token was like
        self._tokens_left = 0  # tokens like it that may come before anything is packed
        self._counted: Sequence[int] | None = None  # rows before the newest token, while those that it made due wait
        self._layout: Layout | None = None  # without the tails

    def __getstate__(self) -> dict[str, Any]:
        """Copies find out anew what dtypes are part of, which cannot be copied, and formats, compared by identity."""
        return {**self.__dict__, "_layout": None, "_token": ()}

    @abstractmethod
    def describe(self) -> Layout | None:
        """Return the layout without the arrays of the tails, its last two; its numbers hold until something is packed.

        None if nothing is packed yet, or only `dense` can be read.
        """

    @abstractmethod
    def check(self, key_dim: int, value_dim: int) -> None:
        """Refuse rows that do not fit, with ValueError."""

    @abstractmethod
    def packed(self, side: Side, rows: Sequence[int]) -> list[int]:
        """Return how many rows of a side are packed in sequences of so many rows."""

    @property
    def lengths(self) -> list[int]:
        """Rows held by each sequence."""
        return self._rows

    def append(
        self,
        keys: Float[mx.array, "batch kv_heads chunk key_dim"],
        values: Float[mx.array, "batch kv_heads chunk value_dim"],
        spans: Sequence[Span] | None = None,
    ) -> None:
        """Append a chunk in full precision, after packing what the rows before it had made due."""
        spans = whole(keys) if spans is None else spans
        token = keys.shape, keys.dtype, values.shape, values.dtype, *spans
        if self._tokens_left and token == self._token:
            return self._append_token(keys, values, spans)
        sequences = len(self._rows) or len(spans)
        if keys.shape[:3] != values.shape[:3] or not len(spans) == keys.shape[0] == sequences:
            raise ValueError(
                f"[mlx_kv] expected keys and values of {sequences} sequences with as many rows each, and as many "
                f"spans, got {list(keys.shape)}, {list(values.shape)} and {len(spans)} spans"
            )
        self.check(keys.shape[3], values.shape[3])
        for side, rows in ((self.keys, keys), (self.values, values)):
            side.refuse_others(rows)
        if not self._rows:
            self.load({}, self.blank(len(spans)).places())
        self.settle()
        counts = [last - first for first, last in spans]
        single = keys.shape[2] == 1 and all(counts)
        for side, rows in ((self.keys, keys), (self.values, values)):
            if single:  # with room for those that may follow, so that a tail is full only where something is packed
                side.tail.reserve([WAITING] * len(counts), rows.shape[1], rows.shape[3], rows.dtype)
            side.append(rows, spans)
        self._count(counts)
        drafted = 1 + self._rollback  # as many at a time may be a draft that is being verified
        self._in_prompt = [n > drafted if n else before for n, before in zip(counts, self._in_prompt, strict=True)]
        if single:
            self._token, self._tokens_left = token, self._tokens_until_packing()
        return None

    def _append_token(self, keys: mx.array, values: mx.array, spans: Sequence[Span]) -> None:
        """Append a token of each sequence like the one before; what it makes due waits, as far as it may."""
        self._tokens_left -= 1
        if not self.rows_wait:
            self._layout = None  # from here on it says of rows that wait that they are packed
        self._counted = self._rows
        self.keys.tail.append(keys, spans)
        self.values.tail.append(values, spans)
        self._count([1] * len(spans))
        if self._layout is not None:
            format, arrays, extent, dense = self._layout
            self._layout = Layout(format, arrays, next_extent(extent), dense)

    def _count(self, counts: Sequence[int]) -> None:
        self._rows = [n + count for n, count in zip(self._rows, counts, strict=True)]
        self._most = [max(n, m) for n, m in zip(self._rows, self._most, strict=True)]

    def _tokens_until_packing(self) -> int:
        """Return how many tokens may come before rows are to be packed, or a tail is to be moved."""
        room = min(min(side.tail.room) for side in (self.keys, self.values))
        # Blocks of rows end at multiples of WAITING: what has become due before is packed there as well.
        to_multiple = (self._rollback - self._rows[0]) % WAITING

        def overdue(tokens: int) -> bool:
            return self._overdue([n + tokens for n in self._rows], WAITING)

        if to_multiple and overdue(to_multiple - 1):
            to_multiple = bisect_right(range(to_multiple), False, key=overdue)
        return min(room, to_multiple)

    def _overdue(self, rows: Sequence[int], waiting: int) -> bool:
        """Tell whether more are due in sequences of so many rows than so many on sides whose rows may wait."""
        return any(
            packed - done > (waiting if side.may_wait else 0)
            for side in (self.keys, self.values)
            for packed, done in zip(self.packed(side, rows), side.codes.lengths, strict=True)
        )

    @property
    def rows_wait(self) -> bool:
        """Whether rows of the tails may count as packed: those that were due before the newest token."""
        return self._counted is not None

    def layout(self) -> Layout | None:
        """Describe the packed rows for attention that reads them as they are."""
        if self._layout is None:
            self._layout = self.describe()
        if self._layout is None:
            return None
        format, arrays, extent, dense = self._layout
        tails = [input_array(side.tail.data, format.dtype) for side in (self.keys, self.values)]
        return Layout(format, (*arrays, *tails), extent, dense)

    def settle(self) -> None:
        """Pack the rows that are due; with `defer`, not before the prompt has ended."""
        self._settle(self._rows)

    def _settle(self, rows: Sequence[int]) -> None:
        """Pack what is due in sequences of so many rows."""
        self._tokens_left, self._layout = 0, None
        waits = [self.defer and in_prompt for in_prompt in self._in_prompt]
        lowest = [n - self._rollback for n in self._most]
        for side in (self.keys, self.values):
            packed = self.packed(side, rows)
            floor = [min(pair) for pair in zip(packed, self.packed(side, lowest), strict=True)]
            side.settle(self._rows, packed, floor, waits)
        self._counted = None  # not before: rows wait as long as they are not packed

    def _pack_waiting(self) -> None:
        """Pack what counts as packed, for whoever looks at the buffers or changes them."""
        self._settle(self._counted) if self._counted is not None else self._forget()

    def _forget(self) -> None:
        """Forget what `append` and `layout` know from the token before."""
        self._tokens_left, self._counted, self._layout = 0, None, None

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return keys and values in the model's dtype."""
        if self._counted is not None and self._overdue(self._counted, 0):
            self._settle(self._counted)
        return self.keys.dense(self._rows), self.values.dense(self._rows)

    def take(self, indices: Int[mx.array, "batch kv_heads kept"], counts: Sequence[int]) -> None:
        """Keep a subset of the rows, read back and packed anew as the rule for so many says."""
        keys, values = (gather_rows(rows, indices) for rows in self.dense())
        in_prompt = self._in_prompt
        self.load({}, self.blank(len(counts)).places())
        self.append(keys, values, [(0, n) for n in counts])
        self._in_prompt = in_prompt
        self.settle()

    def truncate(self, rows: int) -> None:
        """Drop the newest rows; the codes of rows that would not have been packed without them go too."""
        self._pack_waiting()
        counts = [min(rows, n) for n in self._rows]
        self._rows = [n - count for n, count in zip(self._rows, counts, strict=True)]
        for side in (self.keys, self.values):
            side.truncate(counts, self.packed(side, self._rows), self._rows)

    def can_truncate(self, rows: int) -> bool:
        """Tell whether no sequence would go back further than `rollback` rows from the most it has had."""
        return all(most - max(n - rows, 0) <= self._rollback for n, most in zip(self._rows, self._most, strict=True))

    def buffers(self) -> dict[str, RowBuffer]:
        """All buffers, in which nothing waits to be packed."""
        self._pack_waiting()
        sides = (("keys", self.keys), ("values", self.values))
        return {f"{side}_{name}": buffer for side, rows in sides for name, buffer in rows.buffers().items()}

    def held(self) -> list[mx.array]:
        """Return the arrays; what waits to be packed goes on waiting."""
        buffers = [*self.keys.buffers().values(), *self.values.buffers().values()]
        return [buffer.data for buffer in buffers if buffer.data is not None]

    def blank(self, batch: int) -> Self:
        """Return a store of the same configuration with `batch` empty sequences."""
        store = super().blank(batch)
        store._rows, store._most, store._in_prompt = [0] * batch, [0] * batch, [False] * batch
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences."""
        chosen = super().select(sequences)
        chosen._rows = [self._rows[b] for b in sequences]
        chosen._most = [self._most[b] for b in sequences]
        chosen._in_prompt = [self._in_prompt[b] for b in sequences]
        return chosen

    def extend(self, other: Self) -> None:
        """Append another store's sequences."""
        super().extend(other)
        self._rows, self._most = self._rows + other._rows, self._most + other._most
        self._in_prompt = self._in_prompt + other._in_prompt

    def places(self) -> dict[str, Any]:
        """Everything but the arrays."""
        return {**super().places(), "rows": self._rows, "most": self._most, "in_prompt": self._in_prompt}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another store's arrays and places."""
        self._forget()
        self.keys.appended = self.values.appended = None
        super().load(arrays, places)
        self._rows, self._most, self._in_prompt = places["rows"], places["most"], places["in_prompt"]
