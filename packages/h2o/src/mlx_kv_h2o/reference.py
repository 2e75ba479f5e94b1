"""H2O in plain MLX, close to the paper: the specification that kernels and policy are tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int


def column_sums(
    queries: Float[mx.array, "batch query_heads chunk key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    scale: float,
) -> Float32[mx.array, "batch kv_heads rows"]:
    """Attention that the newest `chunk` rows' queries give to each row, causally (arXiv 2306.14048, section 4.1).

    Summed over the queries, averaged over the query heads of a KV head; one query after the other.
    """
    batch, query_heads, chunk, _ = queries.shape
    kv_heads, rows = keys.shape[1:3]
    repeated = mx.repeat(keys.astype(mx.float32), query_heads // kv_heads, axis=1)
    total = mx.zeros((batch, query_heads, rows))
    for i in range(chunk):
        seen = rows - chunk + i + 1
        logits = scale * (repeated[:, :, :seen] @ queries[:, :, i, :, None].astype(mx.float32))[..., 0]
        total[..., :seen] += mx.softmax(logits, axis=-1)
    return total.reshape(batch, kv_heads, -1, rows).mean(axis=2)


def select(
    scores: Float32[mx.array, "batch kv_heads rows"], heavy: int, recent: int
) -> Int[mx.array, "batch kv_heads heavy+recent"]:
    """The `heavy` highest scores before the last `recent` rows, and these: ascending, ties to the lowest row."""
    rows = scores.shape[-1]
    best = mx.argsort(-scores[..., : rows - recent], axis=-1)[..., :heavy]  # stable: equal scores stay in row order
    last = mx.broadcast_to(mx.arange(rows - recent, rows, dtype=mx.uint32), (*scores.shape[:2], recent))
    return mx.sort(mx.concatenate([best, last], axis=-1), axis=-1)
