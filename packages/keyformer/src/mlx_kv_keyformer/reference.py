"""Keyformer in plain MLX, close to the paper: the specification that kernels and policy are tested against."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int


def noise(seed: int, layer: int, head: int, position: int) -> float:
    """Gumbel(0, 1) noise on the logits of one row for one query head, from nothing but these numbers.

    A chain of hashes of 32 bits (Chris Wellons's lowbias32), whose 23 highest bits are a uniform number.
    """
    bits = _mix(seed)
    for number in (layer, head, position):
        bits = _mix((bits + 0x9E3779B9 + number) % 2**32)
    uniform = ((bits >> 9) + 0.5) / 2**23
    return -log(-log(uniform))


def _mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def scores(
    logits: Float[mx.array, "batch query_heads queries rows"], noise: Float[mx.array, "... rows"], tau: float
) -> Float32[mx.array, "batch query_heads rows"]:
    """What the queries add to the score of each row (arXiv 2403.09054, equation 8): logits of -inf add nothing."""
    return mx.softmax((logits.astype(mx.float32) + noise) / tau, axis=-1).sum(axis=2)


def select(
    scores: Float32[mx.array, "batch kv_heads rows"], budget: int, recent: int
) -> Int[mx.array, "batch kv_heads budget"]:
    """The highest scores before the last `recent` rows, and these: ascending, ties to the lowest row."""
    rows = scores.shape[-1]
    best = mx.argsort(-scores[..., : rows - recent], axis=-1)[..., : budget - recent]  # a stable sort
    last = mx.broadcast_to(mx.arange(rows - recent, rows, dtype=mx.uint32), (*scores.shape[:2], recent))
    return mx.sort(mx.concatenate([best, last], axis=-1), axis=-1)
