"""SnapKV's selection in plain MLX, close to the paper: the specification that kernels and policy are tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def votes(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    window: int,
) -> Float[mx.array, "batch kv_heads rows-window"]:
    """Attention that the window's queries give to each row before it, per KV head (arXiv 2404.14469, section 4.1).

    Summed over the queries, averaged over the query heads of a KV head.
    """
    group = queries.shape[1] // keys.shape[1]
    rows, dim = keys.shape[2:]
    repeated = mx.repeat(keys.astype(mx.float32), group, axis=1)
    scores = queries.astype(mx.float32) @ repeated.swapaxes(2, 3) * dim**-0.5
    causal = mx.arange(rows) <= mx.arange(rows - window, rows)[:, None]
    attention = mx.softmax(mx.where(causal, scores, -float("inf")), axis=-1)
    voted = attention.sum(axis=2)[..., : rows - window]
    return voted.reshape(keys.shape[0], keys.shape[1], group, -1).mean(axis=2)


def pool(
    scores: Float[mx.array, "batch kv_heads rows"], kernel_size: int, pooling: str
) -> Float[mx.array, "batch kv_heads rows"]:
    """Pool over neighbours, stride 1; an average counts the padding, a maximum does not."""
    half = kernel_size // 2
    padding = [(0, 0), (0, 0), (half, half)]
    padded = mx.pad(scores, padding, constant_values=0.0 if pooling == "avg" else -float("inf"))
    neighbours = mx.stack([padded[..., i : i + scores.shape[-1]] for i in range(kernel_size)])
    return neighbours.mean(axis=0) if pooling == "avg" else neighbours.max(axis=0)


def select(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    budget: int,
    window: int,
    kernel_size: int,
    pooling: str,
) -> Int[mx.array, "batch kv_heads budget"]:
    """Select the highest budget - window rows before the window, and the window: ascending, ties to the lowest row."""
    rows = keys.shape[2]
    pooled = pool(votes(queries, keys, window), kernel_size, pooling)
    best = mx.argsort(-pooled, axis=-1)[..., : budget - window]  # a stable sort: equal scores stay in row order
    last = mx.broadcast_to(mx.arange(rows - window, rows, dtype=mx.uint32), (*best.shape[:2], window))
    return mx.sort(mx.concatenate([best, last], axis=-1), axis=-1)
