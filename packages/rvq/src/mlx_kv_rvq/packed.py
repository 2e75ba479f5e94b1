"""One side of an RVQ store, keys or values: exact first rows, encoded rows, and the full-precision tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_kv.rows import RowBuffer, Span
from mlx_kv_kernels import gather_rows

from .config import BLOCK
from .reference import Encoded

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from .codec import Codec

_STEP = 256  # rows by which encoded buffers grow, as mlx-lm's cache does
_TAIL_STEP = 64  # rows by which the tail grows: it slides, and is moved to its buffer's front that often


class PackedRows:
    """Rows of one head dim of which the older ones are encoded.

    Of a sequence of n rows, the rows 0..packed-1 are held as codes and norms (the first `sinks` of them exactly, beside
    their codes, which are never read), and the tail holds the others in full precision. With rollback the tail reaches
    back over rows that are packed as well, as far as taking back tokens may have to unpack them.
    """

    def __init__(self, codec: Codec, sinks: int) -> None:
        """Make an empty side that holds the first `sinks` rows exactly."""
        self.codec = codec
        self.sinks = sinks
        self.codes = RowBuffer(_STEP)
        self.norm = RowBuffer(_STEP)
        self.mean = RowBuffer(_STEP // BLOCK)
        self.exact = RowBuffer(max(sinks, 1))
        self.tail = RowBuffer(_TAIL_STEP)
        self.dim = 0
        self._dtype = "float32"  # by name: caches are deep-copied, which MLX's dtypes are not

    def buffers(self) -> dict[str, RowBuffer]:
        """The buffers by name."""
        every = {"codes": self.codes, "norm": self.norm, "exact": self.exact, "tail": self.tail}
        return {**every, "mean": self.mean} if self.codec.centered else every

    @property
    def dtype(self) -> mx.Dtype:
        """The rows' dtype, the model's."""
        return getattr(mx, self._dtype)

    def append(self, rows: mx.array, spans: Sequence[Span]) -> None:
        """Append a chunk to the tail."""
        self.dim, self._dtype = rows.shape[3], str(rows.dtype).removeprefix("mlx.core.")
        self.tail.append(rows, spans)

    def settle(self, rows: Sequence[int], packed: Sequence[int], floor: Sequence[int], waits: Sequence[bool]) -> None:
        """Encode each sequence's rows up to packed[b], and drop the tail's rows below floor[b].

        Args:
            rows: rows n of each sequence.
            packed: rows that are to be encoded; whole blocks, if they are centred. More may be already.
            floor: first row that the tail must keep.
            waits: sequences that are to stay as they are.
        """
        done = self.codes.lengths
        packed = [old if wait else max(old, new) for old, new, wait in zip(done, packed, waits, strict=True)]
        tail_begins = [n - length for n, length in zip(rows, self.tail.lengths, strict=True)]
        first = [old - begin for old, begin in zip(done, tail_begins, strict=True)]
        last = [new - begin for new, begin in zip(packed, tail_begins, strict=True)]
        if any(b > a for a, b in zip(first, last, strict=True)):
            self._pack(done, list(zip(first, last, strict=True)))
        self.tail.drop_front(
            [0 if wait else max(f - begin, 0) for f, begin, wait in zip(floor, tail_begins, waits, strict=True)]
        )

    def truncate(self, counts: Sequence[int], packed: Sequence[int]) -> None:
        """Drop the newest counts[b] rows, and the codes from packed[b] on, whose rows the tail still holds."""
        self.tail.drop_back(counts)
        left = [
            (self.codes, packed),
            (self.norm, packed),
            (self.exact, [min(n, self.sinks) for n in packed]),
        ]
        if self.codec.centered:
            left.append((self.mean, [n // BLOCK for n in packed]))
        for buffer, rows in left:
            buffer.drop_back([max(old - new, 0) for old, new in zip(buffer.lengths, rows, strict=True)])

    def dense(self, rows: Sequence[int]) -> Float[mx.array, "batch heads rows dim"]:
        """Return all rows in the model's dtype, each sequence from its row 0: [batch, heads, max(rows), dim]."""
        packed, exact, tail = self.codes.lengths, self.exact.lengths, self.tail.lengths
        if not any(packed):
            return self.tail.view()
        mean = self.mean.view() if self.codec.centered else None
        decoded = self.codec.decode(Encoded(self.codes.view(), self.norm.view(), mean), self.dim, self.dtype)
        none = decoded[..., :0, :]
        exact_rows = self.exact.view() if any(exact) else none
        tail_rows = self.tail.view() if any(tail) else none
        skip = [
            length - (n - done) for n, done, length in zip(rows, packed, tail, strict=True)
        ]  # tail rows packed as well
        if len(rows) == 1:
            return mx.concatenate([exact_rows, decoded[..., exact[0] :, :], tail_rows[..., skip[0] :, :]], axis=2)
        # Row j of a sequence stands among the exact rows, then among the packed ones, then in the tail.
        source = mx.concatenate([exact_rows, decoded, tail_rows], axis=2)
        j = mx.arange(max(rows))
        in_codes = exact_rows.shape[2] + j
        in_tail = in_codes + mx.array([decoded.shape[2] + s - n for s, n in zip(skip, packed, strict=True)])[:, None]
        places = mx.where(j < mx.array(packed)[:, None], in_codes, in_tail)
        places = mx.where(j < mx.array(exact)[:, None], j, places)
        return _take(source, places)

    def take(self, indices: Int[mx.array, "batch heads kept"], counts: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the rows `indices` of each head, the first counts[b] in sequence b, of which there were rows[b].

        As many rows as before are packed, fewer if no more are kept. Codes move as they are; rows that leave the tail
        are encoded, and packed ones that come to stand among the first `sinks` are held as they read. Not for centred
        rows, which hang on their block.
        """
        packed = self.codes.lengths
        if not any(packed):
            tail = gather_rows(self.tail.view(), indices)
            self.tail.clear(len(counts))
            return self.tail.append(tail, [(0, n) for n in counts])
        kept = [min(old, n) for old, n in zip(packed, counts, strict=True)]
        before = mx.array(packed)[:, None, None]
        coded = mx.minimum(indices, mx.maximum(before, 1) - 1)
        codes, norm = gather_rows(self.codes.view(), coded), gather_rows(self.norm.view(), coded)
        # A row moves down by no more places than rows go, so that only the last packed ones can come from the tail.
        gone = max(n - m for n, m in zip(rows, counts, strict=True))
        if gone:
            slots = mx.maximum(mx.array(kept)[:, None] - gone + mx.arange(gone), 0)
            slots = mx.broadcast_to(slots[:, None], (*indices.shape[:2], gone))
            wanted = mx.take_along_axis(indices, slots, axis=2)
            new = self.codec.encode(self._rows_at(wanted, rows), ())
            fresh = (wanted >= before)[..., None]
            slots = slots[..., None]
            codes, norm = (
                mx.put_along_axis(old, slots, mx.where(fresh, rows, mx.take_along_axis(old, slots, axis=2)), axis=2)
                for old, rows in ((codes, new.codes), (norm, new.norm))
            )
        exact = self._rows_at(indices[..., : self.sinks], rows)
        left = [n - m for n, m in zip(counts, kept, strict=True)]
        last = mx.array(kept)[:, None] + mx.arange(max(left))
        last = mx.broadcast_to(last[:, None], (*indices.shape[:2], max(left)))
        tail = self._rows_at(mx.take_along_axis(indices, mx.minimum(last, indices.shape[2] - 1), axis=2), rows)
        for buffer, held, lengths in (
            (self.codes, codes, kept),
            (self.norm, norm, kept),
            (self.exact, exact, [min(n, self.sinks) for n in kept]),
            (self.tail, tail, left),
        ):
            buffer.clear(len(counts))
            buffer.append(held, [(0, n) for n in lengths])
        return None

    def places(self) -> dict[str, Any]:
        """What tells a row's form, as JSON can hold it."""
        return {"dim": self.dim, "dtype": self._dtype}

    def load(self, places: Mapping[str, Any]) -> None:
        """Take over `places`."""
        self.dim, self._dtype = places["dim"], places["dtype"]

    def _rows_at(self, indices: mx.array, rows: Sequence[int]) -> mx.array:
        """Return the rows `indices` [batch, heads, count] of rows that are not centred, as they read."""
        packed, exact, tail = self.codes.lengths, self.exact.lengths, self.tail.lengths
        found = mx.zeros((*indices.shape, self.dim), self.dtype)
        if not found.size:
            return found
        if any(packed):
            coded = mx.minimum(indices, self.codes.view().shape[2] - 1)
            encoded = Encoded(gather_rows(self.codes.view(), coded), gather_rows(self.norm.view(), coded))
            found = self.codec.decode(encoded, self.dim, self.dtype)
        if any(exact):
            view = self.exact.view()
            own = gather_rows(view, mx.minimum(indices, view.shape[2] - 1))
            found = mx.where((indices < mx.array(exact)[:, None, None])[..., None], own, found)
        if any(tail):
            view, begins = self.tail.view(), mx.array([n - m for n, m in zip(rows, tail, strict=True)])
            place = indices.astype(mx.int32) - begins[:, None, None]
            own = gather_rows(view, mx.clip(place, 0, view.shape[2] - 1))
            found = mx.where((indices >= mx.array(packed)[:, None, None])[..., None], own, found)
        return found

    def _pack(self, done: Sequence[int], spans: Sequence[Span]) -> None:
        """Encode the tail's rows spans[b], which follow the done[b] rows encoded before."""
        counts = [last - first for first, last in spans]
        rows = _shift(self.tail.view(), spans, max(counts))
        new_exact = [min(max(self.sinks - old, 0), n) for old, n in zip(done, counts, strict=True)]
        self.exact.append(rows, [(0, n) for n in new_exact])
        encoded = self.codec.encode(rows, new_exact)  # exact rows are no part of their block's mean
        self.codes.append(encoded.codes, [(0, n) for n in counts])
        self.norm.append(encoded.norm, [(0, n) for n in counts])
        if encoded.mean is not None:
            self.mean.append(encoded.mean, [(0, n // BLOCK) for n in counts])


def _shift(rows: mx.array, spans: Sequence[Span], count: int) -> mx.array:
    """Return `count` rows of each sequence from spans[b][0] on; those beyond the span stand for nothing."""
    if len(spans) == 1:
        return rows[..., spans[0][0] : spans[0][0] + count, :]
    return _take(rows, mx.array([first for first, _ in spans])[:, None] + mx.arange(count))


def _take(rows: mx.array, places: mx.array) -> mx.array:
    """Return the rows places[b] of every head of sequence b; places beyond the array are read as its last row."""
    places = mx.minimum(places, rows.shape[2] - 1)
    return mx.take_along_axis(rows, places[:, None, :, None], axis=2)
