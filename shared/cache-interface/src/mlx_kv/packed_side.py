"""One side of a packed store, keys or values: the buffers, and what is packed into which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .rows import RowBuffer, Span, refuse_others

if TYPE_CHECKING:
    from jaxtyping import Float

STEP = 256
"""Rows by which packed buffers grow, as mlx-lm's cache does."""
_TAIL_STEP = 64  # rows by which the tail grows: it slides, and is moved to its buffer's front that often


class PackedSide(ABC):
    """Keys or values of which the older rows are packed.

    Of a sequence of n rows, the rows 0..packed-1 are held as codes (the first `sinks` of them exactly, beside their
    codes, which are never read), and the tail holds the others in full precision. With rollback the tail reaches back
    over rows that are packed as well, as far as taking back tokens may have to unpack them.
    """

    may_wait: bool = False
    """Whether attention can read rows of the tail as if they were packed."""

    def __init__(self, sinks: int) -> None:
        """Make an empty side that holds the first `sinks` rows exactly."""
        self.sinks = sinks
        self.codes = RowBuffer(STEP)
        self.exact = RowBuffer(max(sinks, 1))
        self.tail = RowBuffer(_TAIL_STEP)
        self.appended: tuple[int, int] | None = None  # heads and dim of the rows that came last

    @abstractmethod
    def scales(self) -> dict[str, tuple[RowBuffer, int]]:
        """What codes are read with: buffers by name, and how many rows share a row of each."""

    @abstractmethod
    def pack(
        self, rows: Float[mx.array, "batch heads rows dim"], done: Sequence[int], exact: Sequence[int]
    ) -> list[mx.array]:
        """Return the codes of rows, and an array for each of `scales`.

        In sequence b they follow done[b] rows packed before, and the first exact[b] of them are held exactly.
        """

    @abstractmethod
    def unpack(self) -> Float[mx.array, "batch heads rows dim"]:
        """Return all packed rows in the model's dtype."""

    def buffers(self) -> dict[str, RowBuffer]:
        """The buffers by name."""
        scales = {name: buffer for name, (buffer, _) in self.scales().items()}
        return {"codes": self.codes, **scales, "exact": self.exact, "tail": self.tail}

    def refuse_others(self, rows: Float[mx.array, "batch heads rows dim"]) -> None:
        """Refuse rows of other heads or another dim than those held, with ValueError."""
        array = self.exact.data if self.tail.data is None else self.tail.data  # both may have become empty
        refuse_others(self.appended if array is None else (array.shape[1], array.shape[3]), rows)

    def append(self, rows: Float[mx.array, "batch heads rows dim"], spans: Sequence[Span]) -> None:
        """Append a chunk to the tail."""
        self.appended = rows.shape[1], rows.shape[3]
        self.tail.append(rows, spans)

    def settle(self, rows: Sequence[int], packed: Sequence[int], floor: Sequence[int], waits: Sequence[bool]) -> None:
        """Pack each sequence's rows up to packed[b], and drop the tail's rows below floor[b].

        Args:
            rows: rows n of each sequence.
            packed: rows that are to be packed, as many as whole rows of `scales` need; more may be already.
            floor: first row that the tail must keep.
            waits: sequences that are to stay as they are.
        """
        done = self.codes.lengths
        tail_begins = [n - length for n, length in zip(rows, self.tail.lengths, strict=True)]
        due = [0 if wait else max(new - old, 0) for old, new, wait in zip(done, packed, waits, strict=True)]
        if any(due):
            spans = [(old - begin, old - begin + n) for old, begin, n in zip(done, tail_begins, due, strict=True)]
            self._pack(done, spans)
        over = [0 if wait else max(f - begin, 0) for f, begin, wait in zip(floor, tail_begins, waits, strict=True)]
        if any(over):
            self.tail.drop_front(over)

    def truncate(self, counts: Sequence[int], packed: Sequence[int], rows: Sequence[int]) -> None:
        """Drop the newest counts[b] rows, of which rows[b] are left, and the codes from packed[b] on.

        But for those whose rows the tail does not hold as well.
        """
        self.tail.drop_back(counts)
        packed = [max(p, n - length) for p, n, length in zip(packed, rows, self.tail.lengths, strict=True)]
        left = [(buffer, [n // shared for n in packed]) for buffer, shared in self.coded()]
        for buffer, rows in [*left, (self.exact, [min(n, self.sinks) for n in packed])]:
            buffer.drop_back([max(old - new, 0) for old, new in zip(buffer.lengths, rows, strict=True)])

    def dense(self, rows: Sequence[int]) -> Float[mx.array, "batch heads rows dim"]:
        """Return all rows in the model's dtype, each sequence from its row 0: [batch, heads, max(rows), dim]."""
        packed, exact, tail = self.codes.lengths, self.exact.lengths, self.tail.lengths
        if not any(packed):
            return self.tail.view()
        from_codes = self.unpack()
        none = from_codes[..., :0, :]
        exact_rows = self.exact.view() if any(exact) else none
        tail_rows = self.tail.view() if any(tail) else none
        # How many rows are packed and in the tail as well.
        both = [length - (n - done) for n, done, length in zip(rows, packed, tail, strict=True)]
        if len(rows) == 1:
            return mx.concatenate([exact_rows, from_codes[..., exact[0] :, :], tail_rows[..., both[0] :, :]], axis=2)
        # Row j of a sequence stands among the exact rows, then among the packed ones, then in the tail.
        source = mx.concatenate([exact_rows, from_codes, tail_rows], axis=2)
        j = mx.arange(max(rows))
        in_codes = exact_rows.shape[2] + j
        in_tail = in_codes + mx.array([from_codes.shape[2] + s - n for s, n in zip(both, packed, strict=True)])[:, None]
        places = mx.where(j < mx.array(packed)[:, None], in_codes, in_tail)
        return _take(source, mx.where(j < mx.array(exact)[:, None], j, places))

    def coded(self) -> list[tuple[RowBuffer, int]]:
        """The buffers of what `pack` returns, and how many rows share a row of each."""
        return [(self.codes, 1), *self.scales().values()]

    def _pack(self, done: Sequence[int], spans: Sequence[Span]) -> None:
        """Pack the tail's rows spans[b], which follow the done[b] rows packed before."""
        counts = [last - first for first, last in spans]
        rows = self.tail.part(spans)
        exact = [min(max(self.sinks - old, 0), n) for old, n in zip(done, counts, strict=True)]
        packed_rows = self.pack(rows, done, exact)  # before anything is appended: it may raise
        self.exact.append(rows, [(0, n) for n in exact])
        for (buffer, shared), packed in zip(self.coded(), packed_rows, strict=True):
            buffer.append(packed, [(0, n // shared) for n in counts])


def _take(rows: mx.array, places: mx.array) -> mx.array:
    """Return the rows places[b] of every head of sequence b; places beyond the array are read as its last row."""
    places = mx.minimum(places, rows.shape[2] - 1)
    return mx.take_along_axis(rows, places[:, None, :, None], axis=2)
