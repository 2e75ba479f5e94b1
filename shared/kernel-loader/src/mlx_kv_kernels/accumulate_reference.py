"""What `accumulate` computes, in plain MLX ops: the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32, UInt32

    from .accumulate import Noise, Step


def gumbel(
    seed: int, layer: int, heads: Int32[mx.array, "*shape"], positions: Int32[mx.array, "*shape"]
) -> Float32[mx.array, "*shape"]:
    """Gumbel(0, 1) noise that depends on nothing but these numbers; `heads` and `positions` are broadcast.

    The 23 highest bits of a chain of hashes are a uniform number between 0 and 1, both excluded.
    """
    bits = _mix(mx.array(seed, mx.uint32))
    for number in (mx.array(layer, mx.uint32), heads.astype(mx.uint32), positions.astype(mx.uint32)):
        bits = _mix(bits + mx.array(0x9E3779B9, mx.uint32) + number)
    uniform = ((bits >> 9).astype(mx.float32) + 0.5) * 2.0**-23
    return -mx.log(-mx.log(uniform))


def _mix(x: mx.array) -> mx.array:
    """Hash 32 bits (Chris Wellons's lowbias32)."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def accumulate_scores(
    logits: Float[mx.array, "batch query_heads rows"],
    scores: Float32[mx.array, "kv_heads total"],
    positions: Int32[mx.array, "kv_heads total"],
    steps: Sequence[Step],
    sinks: Float[mx.array, " query_heads"] | None,
    noise: Noise | None,
) -> tuple[Float32[mx.array, "kv_heads total"], Int32[mx.array, "kv_heads total"], UInt32[mx.array, "batch kv_heads"]]:
    """Add each sequence's probabilities to its scores, and put the newest row where the lowest score was."""
    done: list[tuple[mx.array, mx.array, mx.array]] = []
    for sequence, step in enumerate(steps):
        room = slice(step.begin, step.limit)
        old = scores[:, room], positions[:, room]
        if step.rows:
            done.append(_accumulate(logits[sequence, :, : step.rows], *old, step, sinks, noise))
        else:
            done.append((*old, mx.zeros((len(scores),), mx.uint32)))
    new_scores, new_positions = (mx.concatenate([one[i] for one in done], axis=1) for i in range(2))
    return new_scores, new_positions, mx.stack([dropped for _, _, dropped in done])


def _accumulate(
    logits: mx.array,
    scores: mx.array,
    positions: mx.array,
    step: Step,
    sinks: mx.array | None,
    noise: Noise | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Do so for one sequence, whose room `scores` and `positions` [kv_heads, room] are."""
    kv_heads, rows, newest = scores.shape[0], step.rows, step.rows - 1
    group = logits.shape[0] // kv_heads
    place = mx.arange(scores.shape[1])
    positions = mx.where(place == newest, step.position, positions)
    if noise is not None:
        heads = mx.arange(len(logits))[:, None]
        logits = logits + noise.scale * gumbel(
            noise.seed, noise.layer, heads, mx.repeat(positions[:, :rows], group, axis=0)
        )
    if sinks is not None:
        logits = mx.concatenate([logits, sinks.astype(mx.float32)[:, None]], axis=1)
    weights = mx.softmax(logits / step.temperature, axis=-1)[:, :rows]
    added = weights.reshape(kv_heads, group, rows).mean(axis=1)
    added = mx.pad(added, [(0, 0), (0, scores.shape[1] - rows)])
    scores = mx.where(place == newest, 0, scores) + added
    if not step.drops:
        return scores, positions, mx.zeros((kv_heads,), mx.uint32)
    compared = mx.where(mx.isnan(scores), -float("inf"), scores)
    candidate = (place < rows) & (positions < step.window)
    lowest = mx.where(candidate, compared, float("inf")).min(axis=1, keepdims=True)
    tied = candidate & (compared == lowest)
    dropped = mx.argmax(mx.where(tied, positions, -1), axis=1)
    there = place == dropped[:, None]
    scores = mx.where(there, scores[:, newest : newest + 1], scores)
    return scores, mx.where(there, step.position, positions), dropped
