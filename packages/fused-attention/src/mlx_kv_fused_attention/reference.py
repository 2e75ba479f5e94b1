"""Decode attention in plain MLX, in float32: the specification."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_kv_kernels.accumulate_reference import accumulate_scores

if TYPE_CHECKING:
    from jaxtyping import Float

    from mlx_kv_kernels.accumulate import Noise, Step


def attend(
    queries: Float[mx.array, "batch query_heads 1 key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    values: Float[mx.array, "batch kv_heads rows value_dim"],
    lengths: Sequence[int],
    scale: float,
    sinks: Float[mx.array, " query_heads"] | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Attend with one query row per sequence over its first `lengths[b]` rows.

    Returns:
        The output [batch, query_heads, 1, value_dim] in the dtype of the queries, zero where there is nothing to attend
        to; the logits [batch, query_heads, rows] (scale * q.k, -inf beyond a sequence's length) and their logsumexp
        [batch, query_heads], the sink included, in float32.
    """
    batch, query_heads, _, key_dim = queries.shape
    kv_heads, rows = keys.shape[1:3]
    grouped = queries.astype(mx.float32).reshape(batch, kv_heads, query_heads // kv_heads, key_dim)
    logits = scale * (grouped @ keys.astype(mx.float32).swapaxes(-1, -2))
    valid = mx.arange(rows) < mx.array(list(lengths))[:, None]
    logits = mx.where(valid[:, None, None], logits, -float("inf"))
    scores = logits.reshape(batch, query_heads, rows)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32)[:, None], (batch, query_heads, 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    lse = mx.logsumexp(scores, axis=-1)
    # Without a row every logit is -inf, and its difference from anything finite too.
    finite = mx.where(mx.isinf(lse), 0.0, lse)[..., None]
    weights = mx.exp(logits.reshape(batch, query_heads, rows) - finite)
    rows_of_value = mx.where(valid[:, None, :, None], values.astype(mx.float32), 0.0)  # what lies beyond may be NaN
    output = weights.reshape(logits.shape) @ rows_of_value
    output = output.reshape(batch, query_heads, 1, values.shape[3]).astype(queries.dtype)
    return output, logits.reshape(batch, query_heads, rows), lse


def exchange(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    newest_key: mx.array,
    newest_value: mx.array,
    overdue: mx.array,
    taken: mx.array,
    scale: float,
    scores: mx.array,
    positions: mx.array,
    step: Step,
    sinks: mx.array | None,
    noise: Noise | None,
) -> tuple[mx.array, ...]:
    """Write the overdue rows, attend, add the attention to the scores, and let the newest row join the overdue ones."""
    number, (count, *_) = mx.arange(taken.shape[0])[:, None], cast("list[int]", taken[-1].tolist())

    def written(rows: mx.array, late: mx.array, newest: mx.array) -> mx.array:
        places = taken[:count].T[None, ..., None]
        rows = mx.put_along_axis(rows, places, late[:, :, :count], axis=2)
        return mx.concatenate([rows[:, :, : step.rows - 1], newest], axis=2)

    key_dim = keys.shape[3]
    keys = written(keys, overdue[..., :key_dim], newest_key)
    values = written(values, overdue[..., key_dim:], newest_value)
    output, logits, _ = attend(queries, keys, values, [step.rows], scale, sinks)
    of_heads = mx.squeeze(scores, (0, 3)), mx.squeeze(positions, (0, 3))
    sums, own, dropped = accumulate_scores(logits, *of_heads, [step], sinks, noise)
    newest = mx.concatenate([newest_key, newest_value], axis=3)
    return (
        output,
        mx.expand_dims(sums, (0, 3)),
        mx.expand_dims(own, (0, 3)),
        mx.where(number[:-1] == count, newest, overdue),
        mx.where(number == count, dropped, taken + (number == number[-1])).astype(mx.uint32),
    )


def merge_splits(
    outputs: Float[mx.array, "*batch splits dim"], lse: Float[mx.array, "*batch splits"]
) -> tuple[mx.array, mx.array]:
    """Merge splits: M = max lse_i, w_i = 2^(lse_i - M), o = sum w_i o_i / sum w_i, lse = M + log2 sum w_i."""
    largest, weights, total = _weights(lse.astype(mx.float32))
    output = (weights[..., None] * outputs.astype(mx.float32)).sum(axis=-2) / mx.where(total > 0, total, 1.0)
    return output, (largest + mx.log2(total)).squeeze(-1)


def merged_lse(lse: Float[mx.array, "*batch splits"]) -> Float[mx.array, "*batch"]:
    """Return the lse of `merge_splits` alone."""
    largest, _, total = _weights(lse)
    return (largest + mx.log2(total)).squeeze(-1)


def _weights(lse: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    largest = lse.max(axis=-1, keepdims=True)
    weights = mx.exp((lse - mx.where(mx.isinf(largest), 0.0, largest)) * log(2))
    return largest, weights, weights.sum(axis=-1, keepdims=True)
