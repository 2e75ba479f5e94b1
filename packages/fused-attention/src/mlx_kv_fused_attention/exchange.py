"""A step at a full budget: attention, its scores, and the newest row in the place of the one with the lowest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.layout import Layout, exchanged_format, extent
from mlx_kv_kernels import resolve_backend
from mlx_kv_kernels.accumulate import Noise, Step, step_arrays

from . import reference
from .attend import launch_exchange
from .plan import refusal

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32, UInt32


def exchange(
    queries: Float[mx.array, "1 query_heads 1 key_dim"],
    keys: Float[mx.array, "1 kv_heads total key_dim"],
    values: Float[mx.array, "1 kv_heads total value_dim"],
    newest_key: Float[mx.array, "1 kv_heads 1 key_dim"],
    newest_value: Float[mx.array, "1 kv_heads 1 value_dim"],
    overdue: Float[mx.array, "1 kv_heads 32 key_dim+value_dim"],
    taken: UInt32[mx.array, "33 kv_heads"],
    scale: float,
    scores: Float32[mx.array, "1 kv_heads room 1"],
    positions: Int32[mx.array, "1 kv_heads room 1"],
    step: Step,
    sinks: Float[mx.array, " query_heads"] | None = None,
    noise: Noise | None = None,
    *,
    backend: str | None = None,
) -> tuple[mx.array, ...]:
    """Attend to the rows of one sequence, take note of it, and give the newest the place of another, in two launches.

    Args:
        queries: one row, after RoPE, in the rows' dtype.
        keys: of the rows, of which the first step.rows - 1 count.
        values: likewise.
        newest_key: the token's own.
        newest_value: likewise.
        overdue: rows that have taken places of others and are not written there yet, a key and its value side by side.
        taken: the places that they have taken, of each head no two the same; the last row tells instead how many they
            are, 31 at most.
        scale: what dot products are multiplied with.
        scores: of the rows, and behind them room for the newest.
        positions: of their tokens.
        step: what is to be done, as `accumulate_scores` takes it: a row has to go, and there is one before the window.
        sinks: logits that join the softmax without a row, one per query head (default: none).
        noise: added to the logits that the scores are made of (default: none).
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        The output [1, query_heads, 1, value_dim], scores, positions, overdue rows and the places that they take, the
        newest now the last of them.

    Raises:
        ValueError: there is no kernel for these shapes or dtypes.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    (_, heads, of_keys, key_dim), (_, _, of_values, value_dim) = keys.shape, values.shape
    of_rows = extent((step.rows,), ((0, of_keys, 0, of_values, step.rows - 1),))
    arrays = keys, values, newest_key, newest_value, overdue, taken
    layout = Layout(exchanged_format(heads, key_dim, value_dim, keys.dtype), arrays, of_rows, lambda: (keys, values))
    reason = refusal(queries, layout, sinks)
    if reason is not None:
        raise ValueError(f"[exchange] {reason}")
    backend = resolve_backend(backend)
    if backend == "reference":
        return reference.exchange(queries, *arrays, scale, scores, positions, step, sinks, noise)
    of_scores = [scores, positions, *step_arrays([step], queries.shape[1], sinks, noise)]
    return tuple(launch_exchange(queries, layout, scale, of_scores, noise is not None, backend))
