"""One side of a KIVI store, keys or values: exact first rows, packed rows, and the full-precision tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.rows import RowBuffer, Span

from .reference import Quantized

if TYPE_CHECKING:
    from jaxtyping import Float

_STEP = 256  # rows by which packed buffers grow, as mlx-lm's cache does
_TAIL_STEP = 64  # rows by which the tail grows: it slides, and is moved to its buffer's front that often


class PackedRows:
    """Rows of one head dim of which the older ones are quantised.

    Of a sequence of n rows, the rows 0..packed-1 are held as codes (the first `sinks` of them exactly, beside their
    codes, which are never read), and the tail holds the others in full precision. With rollback the tail reaches back
    over rows that are packed as well, as far as taking back tokens may have to unpack them.
    """

    def __init__(
        self,
        quantize: Callable[[mx.array], Quantized],
        dequantize: Callable[[Quantized], mx.array],
        rows_per_scale: int,
        sinks: int,
    ) -> None:
        """Make an empty side.

        Args:
            quantize: [batch, heads, rows, dim] to codes, scale and minimum.
            dequantize: its inverse.
            rows_per_scale: rows that share a row of `scale` and `minimum`.
            sinks: first rows held exactly.
        """
        self.quantize = quantize
        self.dequantize = dequantize
        self.rows_per_scale = rows_per_scale
        self.sinks = sinks
        self.codes = RowBuffer(_STEP)
        self.scale = RowBuffer(_STEP // rows_per_scale)
        self.minimum = RowBuffer(_STEP // rows_per_scale)
        self.exact = RowBuffer(max(sinks, 1))
        self.tail = RowBuffer(_TAIL_STEP)

    def buffers(self) -> dict[str, RowBuffer]:
        """The buffers by name."""
        return {
            "codes": self.codes,
            "scale": self.scale,
            "minimum": self.minimum,
            "exact": self.exact,
            "tail": self.tail,
        }

    def settle(self, rows: Sequence[int], packed: Sequence[int], floor: Sequence[int], waits: Sequence[bool]) -> None:
        """Quantise each sequence's rows up to packed[b], and drop the tail's rows below floor[b].

        Args:
            rows: rows n of each sequence.
            packed: rows that are to be quantised; a multiple of rows_per_scale, never fewer than before.
            floor: first row that the tail must keep.
            waits: sequences that are to stay as they are.
        """
        done = self.codes.lengths
        packed = [old if wait else new for old, new, wait in zip(done, packed, waits, strict=True)]
        tail_begins = [n - length for n, length in zip(rows, self.tail.lengths, strict=True)]
        first = [old - begin for old, begin in zip(done, tail_begins, strict=True)]
        last = [new - begin for new, begin in zip(packed, tail_begins, strict=True)]
        if any(b > a for a, b in zip(first, last, strict=True)):
            self._pack(done, list(zip(first, last, strict=True)))
        self.tail.drop_front(
            [0 if wait else f - begin for f, begin, wait in zip(floor, tail_begins, waits, strict=True)]
        )

    def truncate(self, counts: Sequence[int], packed: Sequence[int]) -> None:
        """Drop the newest counts[b] rows, and the codes from packed[b] on, whose rows the tail still holds."""
        self.tail.drop_back(counts)
        for buffer, rows in (
            (self.codes, packed),
            (self.exact, [min(n, self.sinks) for n in packed]),
            (self.scale, [n // self.rows_per_scale for n in packed]),
            (self.minimum, [n // self.rows_per_scale for n in packed]),
        ):
            buffer.drop_back([max(old - new, 0) for old, new in zip(buffer.lengths, rows, strict=True)])

    def dense(self, rows: Sequence[int]) -> Float[mx.array, "batch heads rows dim"]:
        """Return all rows in the model's dtype, each sequence from its row 0: [batch, heads, max(rows), dim]."""
        packed, exact, tail = self.codes.lengths, self.exact.lengths, self.tail.lengths
        if not any(packed):
            return self.tail.view()
        from_codes = self.dequantize(Quantized(self.codes.view(), self.scale.view(), self.minimum.view()))
        none = from_codes[..., :0, :]
        exact_rows = self.exact.view() if any(exact) else none
        tail_rows = self.tail.view() if any(tail) else none
        skip = [
            length - (n - done) for n, done, length in zip(rows, packed, tail, strict=True)
        ]  # tail rows packed as well
        if len(rows) == 1:
            parts = [exact_rows, from_codes[..., exact[0] :, :], tail_rows[..., skip[0] :, :]]
            return mx.concatenate(parts, axis=2)
        # Row j of a sequence stands among the exact rows, then among the packed ones, then in the tail.
        source = mx.concatenate([exact_rows, from_codes, tail_rows], axis=2)
        j = mx.arange(max(rows))
        in_codes = exact_rows.shape[2] + j
        in_tail = in_codes + mx.array([from_codes.shape[2] + s - n for s, n in zip(skip, packed, strict=True)])[:, None]
        places = mx.where(j < mx.array(packed)[:, None], in_codes, in_tail)
        places = mx.where(j < mx.array(exact)[:, None], j, places)
        return _take(source, places)

    def _pack(self, done: Sequence[int], spans: Sequence[Span]) -> None:
        """Quantise the tail's rows spans[b], which follow the done[b] rows packed before."""
        counts = [last - first for first, last in spans]
        rows = _shift(self.tail.view(), spans, max(counts))
        new_exact = [(0, min(max(self.sinks - old, 0), n)) for old, n in zip(done, counts, strict=True)]
        self.exact.append(rows, new_exact)
        if self.rows_per_scale > 1 and any(last for _, last in new_exact):
            # The exact rows must not widen their groups' range: in their place the groups see the first row after them.
            place = mx.array(list(done))[:, None, None, None] + mx.arange(max(counts))[:, None]
            rows = mx.where(place < self.sinks, rows[..., self.sinks : self.sinks + 1, :], rows)
        codes, scale, minimum = self.quantize(rows)
        self.codes.append(codes, [(0, n) for n in counts])
        self.scale.append(scale, [(0, n // self.rows_per_scale) for n in counts])
        self.minimum.append(minimum, [(0, n // self.rows_per_scale) for n in counts])


def _shift(rows: mx.array, spans: Sequence[Span], count: int) -> mx.array:
    """Return `count` rows of each sequence from spans[b][0] on; those beyond the span stand for nothing."""
    if len(spans) == 1:
        return rows[..., spans[0][0] : spans[0][0] + count, :]
    return _take(rows, mx.array([first for first, _ in spans])[:, None] + mx.arange(count))


def _take(rows: mx.array, places: mx.array) -> mx.array:
    """Return the rows places[b] of every head of sequence b; places beyond the array are read as its last row."""
    places = mx.minimum(places, rows.shape[2] - 1)
    return mx.take_along_axis(rows, places[:, None, :, None], axis=2)
