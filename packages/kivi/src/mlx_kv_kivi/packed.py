"""One side of a KIVI store, keys or values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.packed_side import STEP, PackedSide
from mlx_kv.rows import RowBuffer

from .quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values
from .reference import Quantized

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Quantizer:
    """How the rows of a side are quantised; equal ones share what is made for them."""

    bits: int
    group_size: int
    per_channel: bool
    """Whether a group is rows of one channel, as of keys, or channels of one row."""

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a row of scales."""
        return self.group_size if self.per_channel else 1

    def __call__(self, rows: Float[mx.array, "batch heads rows dim"]) -> Quantized:
        """Quantise rows."""
        return (quantize_keys if self.per_channel else quantize_values)(rows, self.bits, self.group_size)

    def undo(self, quantized: Quantized) -> Float[mx.array, "batch heads rows dim"]:
        """Dequantise rows."""
        return (dequantize_keys if self.per_channel else dequantize_values)(quantized, self.bits, self.group_size)


class PackedRows(PackedSide):
    """Rows of one head dim of which the older ones are quantised."""

    def __init__(self, quantizer: Quantizer, sinks: int) -> None:
        """Make an empty side that holds the first `sinks` rows exactly."""
        super().__init__(sinks)
        self.quantizer = quantizer
        self.may_wait = not quantizer.per_channel  # attention's kernel quantises a row, not rows together
        self.rows_per_scale = quantizer.rows_per_scale
        self.scale = RowBuffer(STEP // self.rows_per_scale)
        self.minimum = RowBuffer(STEP // self.rows_per_scale)

    def scales(self) -> dict[str, tuple[RowBuffer, int]]:
        """Scale and minimum of each group."""
        return {"scale": (self.scale, self.rows_per_scale), "minimum": (self.minimum, self.rows_per_scale)}

    def pack(
        self, rows: Float[mx.array, "batch heads rows dim"], done: Sequence[int], exact: Sequence[int]
    ) -> list[mx.array]:
        """Quantise rows."""
        if self.rows_per_scale > 1 and any(exact):
            # The exact rows must not widen their groups' range: in their place the groups see the first row after them.
            place = mx.array(list(done))[:, None, None, None] + mx.arange(rows.shape[2])[:, None]
            rows = mx.where(place < self.sinks, rows[..., self.sinks : self.sinks + 1, :], rows)
        return list(self.quantizer(rows))

    def unpack(self) -> Float[mx.array, "batch heads rows dim"]:
        """Dequantise all packed rows."""
        return self.quantizer.undo(Quantized(self.codes.view(), self.scale.view(), self.minimum.view()))
