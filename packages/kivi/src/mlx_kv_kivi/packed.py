"""One side of a KIVI store, keys or values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.packing import STEP, PackedSide
from mlx_kv.rows import RowBuffer

from .reference import Quantized

if TYPE_CHECKING:
    from jaxtyping import Float


Quantizer = Callable[[mx.array], Quantized]
Dequantizer = Callable[[Quantized], mx.array]


class PackedRows(PackedSide):
    """Rows of one head dim of which the older ones are quantised."""

    def __init__(
        self,
        quantize: Quantizer,
        dequantize: Dequantizer,
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
        super().__init__(sinks)
        self.quantize = quantize
        self.dequantize = dequantize
        self.rows_per_scale = rows_per_scale
        self.scale = RowBuffer(STEP // rows_per_scale)
        self.minimum = RowBuffer(STEP // rows_per_scale)

    def scales(self) -> dict[str, tuple[RowBuffer, int]]:
        """Scale and minimum of each group."""
        return {"scale": (self.scale, self.rows_per_scale), "minimum": (self.minimum, self.rows_per_scale)}

    @property
    def row_packer(self) -> Quantizer | None:
        """The quantiser, if no rows share a scale."""
        return self.quantize if self.rows_per_scale == 1 else None

    def pack(
        self, rows: Float[mx.array, "batch heads rows dim"], done: Sequence[int], exact: Sequence[int]
    ) -> list[mx.array]:
        """Quantise rows."""
        if self.rows_per_scale > 1 and any(exact):
            # The exact rows must not widen their groups' range: in their place the groups see the first row after them.
            place = mx.array(list(done))[:, None, None, None] + mx.arange(rows.shape[2])[:, None]
            rows = mx.where(place < self.sinks, rows[..., self.sinks : self.sinks + 1, :], rows)
        return list(self.quantize(rows))

    def unpack(self) -> Float[mx.array, "batch heads rows dim"]:
        """Dequantise all packed rows."""
        return self.dequantize(Quantized(self.codes.view(), self.scale.view(), self.minimum.view()))
