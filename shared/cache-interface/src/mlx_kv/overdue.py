"""Rows that have taken the places of others and are written there together, not one at every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import mlx.core as mx

from .rows import put_rows

if TYPE_CHECKING:
    from jaxtyping import Float, UInt32

MOST = 32
"""Rows that wait at most: one for each lane of the kernels that look for them."""


@dataclass
class Overdue:
    """The newest rows of the only sequence, in the order of their tokens."""

    rows: Float[mx.array, "1 kv_heads 32 key_dim+value_dim"]
    """A key and its value side by side."""
    taken: UInt32[mx.array, "33 kv_heads"]
    """The place that each of them has taken; the last row tells instead how many they are, for kernels."""
    count: int = 0
    """How many they are, for the host."""

    @classmethod
    def none(cls, keys: mx.array, values: mx.array) -> Self:
        """Return room for rows of these arrays [1, kv_heads, rows, dim]."""
        heads, width = keys.shape[1], keys.shape[3] + values.shape[3]
        return cls(mx.zeros((1, heads, MOST, width), keys.dtype), mx.zeros((MOST + 1, heads), mx.uint32))

    def written(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the arrays with the rows in their places."""
        if self.count == 0:
            return keys, values
        rows, places, key_dim = self.rows[:, :, : self.count], self.taken[: self.count], keys.shape[3]
        of_heads = places.T[None, ..., None]
        return put_rows(keys, of_heads, rows[..., :key_dim]), put_rows(values, of_heads, rows[..., key_dim:])
