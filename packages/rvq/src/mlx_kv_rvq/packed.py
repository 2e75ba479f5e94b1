"""One side of an RVQ store, keys or values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_kv.packed_side import STEP, PackedSide
from mlx_kv.rows import RowBuffer, Span
from mlx_kv_kernels import gather_rows

from .codec import Codec
from .config import BLOCK
from .reference import Encoded

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class PackedRows(PackedSide):
    """Rows of one head dim of which the older ones are encoded."""

    def __init__(self, codec: Codec, sinks: int) -> None:
        """Make an empty side that holds the first `sinks` rows exactly."""
        super().__init__(sinks)
        self.codec = codec
        self.norm = RowBuffer(STEP)
        self.mean = RowBuffer(STEP // BLOCK)
        self.dim = 0
        self._dtype = "float32"  # by name: caches are deep-copied, which MLX's dtypes are not

    @property
    def dtype(self) -> mx.Dtype:
        """The rows' dtype, the model's."""
        return getattr(mx, self._dtype)

    def scales(self) -> dict[str, tuple[RowBuffer, int]]:
        """Norms of rows, and the means of blocks if they are centred."""
        return {"norm": (self.norm, 1), **({"mean": (self.mean, BLOCK)} if self.codec.centered else {})}

    def append(self, rows: Float[mx.array, "batch heads rows dim"], spans: Sequence[Span]) -> None:
        """Append a chunk to the tail."""
        self.dim, self._dtype = rows.shape[3], str(rows.dtype).removeprefix("mlx.core.")
        super().append(rows, spans)

    def pack(
        self, rows: Float[mx.array, "batch heads rows dim"], done: Sequence[int], exact: Sequence[int]
    ) -> list[mx.array]:
        """Encode rows; exact ones are no part of their block's mean."""
        encoded = self.codec.encode(rows, exact)
        return [array for array in encoded if array is not None]

    def unpack(self) -> Float[mx.array, "batch heads rows dim"]:
        """Decode all packed rows."""
        mean = self.mean.view() if self.codec.centered else None
        return self.codec.decode(Encoded(self.codes.view(), self.norm.view(), mean), self.dim, self.dtype)

    def take(self, indices: Int[mx.array, "batch heads kept"], counts: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the rows `indices` of each head, the first counts[b] in sequence b, of which there were rows[b].

        As many rows as before are packed, fewer if no more are kept. Codes move as they are; rows that leave the tail
        are encoded, and packed ones that come to stand among the first `sinks` are held as they read. Not for centred
        rows, which hang on their block.
        """
        indices, packed = indices.astype(mx.int32), self.codes.lengths
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
