"""What the kernels of `window` compute, in plain MLX ops: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Float32


_TILE = 1 << 20  # numbers of a tile of scores, at most


def window_scores(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    scale: float,
    sinks: Float[mx.array, " query_heads"] | None = None,
    bias: Float32[mx.array, "batch query_heads rows"] | None = None,
) -> Float32[mx.array, "batch kv_heads rows"]:
    """Softmax of every query over the rows it sees; per row, the sum over the queries and the mean over the group.

    Tile by tile of queries: a long prompt's scores of all queries at once would be larger than its cache.
    """
    batch, query_heads, window = queries.shape[:3]
    kv_heads, rows = keys.shape[1:3]
    size = max(_TILE // (batch * query_heads * rows), 1)
    total = mx.zeros((batch, query_heads, rows))
    for first in range(0, window, size):
        # Not before the tile before is done with.
        tile = cast("mx.array", mx.depends(queries[:, :, first : first + size], total))
        seen = rows - window + first + tile.shape[2]  # by its last query
        seen_bias = None if bias is None else bias[..., :seen]
        total[..., :seen] += _column_sums(tile, keys[:, :, :seen], rows - window + first, scale, sinks, seen_bias)
    return total.reshape(batch, kv_heads, -1, rows).mean(axis=2)


def _column_sums(
    queries: mx.array, keys: mx.array, first: int, scale: float, sinks: mx.array | None, bias: mx.array | None
) -> mx.array:
    """Sum the softmax of some queries, the first of which stands at row `first`: [batch, query_heads, rows]."""
    batch, query_heads, count, dim = queries.shape
    _, kv_heads, rows, _ = keys.shape
    grouped = queries.astype(mx.float32).reshape(batch, kv_heads, -1, dim)
    scores = scale * (grouped @ keys.astype(mx.float32).swapaxes(2, 3))
    scores = scores.reshape(batch, query_heads, count, rows)
    if bias is not None:
        scores = scores + bias[:, :, None]
    visible = mx.arange(rows) <= mx.arange(first, first + count)[:, None]
    scores = mx.where(visible, scores, -float("inf"))
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (batch, query_heads, count, 1))
        scores = mx.concatenate([scores, column], axis=-1)
    return mx.softmax(scores, axis=-1)[..., :rows].sum(axis=2)


def pool_scores(
    votes: Float32[mx.array, "batch kv_heads rows"], window: int, kernel_size: int, pooling: str, sinks: int = 0
) -> Float32[mx.array, "batch kv_heads rows"]:
    """Pool over kernel_size neighbours among the rows before the window, stride 1; always kept rows get +infinity.

    An average counts absent neighbours as zero and adds in ascending order.
    """
    rows = votes.shape[-1]
    before, half = votes[..., : rows - window], kernel_size // 2
    padding = [(0, 0), (0, 0), (half, half)]
    padded = mx.pad(before, padding, constant_values=0.0 if pooling == "avg" else -float("inf"))
    shifted = [padded[..., i : i + rows - window] for i in range(kernel_size)]
    pooled = shifted[0]
    for neighbours in shifted[1:]:
        pooled = pooled + neighbours if pooling == "avg" else mx.maximum(pooled, neighbours)
    pooled = pooled * (1 / kernel_size) if pooling == "avg" else pooled
    pooled = mx.concatenate([pooled, votes[..., rows - window :]], axis=-1)
    place = mx.arange(rows)
    return mx.where((place < sinks) | (place >= rows - window), float("inf"), pooled)
