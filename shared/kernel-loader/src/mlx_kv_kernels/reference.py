"""What the kernels compute, in plain MLX ops: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float32, Int, Shaped, UInt32


def topk_rows(
    scores: Float32[mx.array, "batch kv_heads rows"], k: int, lengths: Int[mx.array, " batch"] | None = None
) -> UInt32[mx.array, "batch kv_heads k"]:
    """The rows of the k highest scores of each head, ascending; ties go to the lowest row.

    -0 equals +0. NaN loses to everything, -infinity too; rows from a sequence's length on lose even to NaN.
    """
    bits = scores.view(mx.uint32)
    # Unsigned keys that ascend with the score: negative numbers have all bits flipped, the others only the sign.
    keys = mx.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    keys = mx.where(bits == 0x80000000, 0x80000000, keys)
    keys = mx.where((bits & 0x7FFFFFFF) > 0x7F800000, 0, keys)
    rows = mx.arange(scores.shape[-1], dtype=mx.uint32)
    if lengths is not None:
        keys = mx.where(rows < lengths[:, None, None], keys, 0)
    # The row in the low bits breaks every tie, so no two of these are equal and any sort gives the same order.
    ranked = (keys.astype(mx.uint64) << 32) | (0xFFFFFFFF - rows).astype(mx.uint64)
    kept = mx.argpartition(ranked, -k, axis=-1)[..., -k:]
    return mx.sort(kept.astype(mx.uint32), axis=-1)


def gather_rows(
    rows: Shaped[mx.array, "batch kv_heads rows width"], indices: Int[mx.array, "batch kv_heads k"]
) -> Shaped[mx.array, "batch kv_heads k width"]:
    """The rows that `indices` names, in its order."""
    return mx.take_along_axis(rows, indices[..., None], axis=2)
