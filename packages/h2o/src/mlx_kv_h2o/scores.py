"""H2O's scores and selection: checks, then the kernels or their reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_kv_kernels.accumulate import select_rows
from mlx_kv_kernels.window import window_scores

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float, Float32, UInt32


def column_sums(
    queries: Float[mx.array, "batch query_heads chunk key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    scale: float,
    *,
    backend: str | None = None,
) -> Float32[mx.array, "batch kv_heads rows"]:
    """Attention that the newest rows' queries give to each row (arXiv 2306.14048, section 4.1).

    Sums of the causal softmax over the queries, the mean over the query heads of a KV head. Two passes over tiles: the
    softmax's denominators, then the sums; no array of chunk times rows is made.

    Args:
        queries: of the last `chunk` rows, after RoPE, in the keys' dtype.
        keys: of all rows, after RoPE.
        scale: what dot products are multiplied with.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Raises:
        ValueError: if shapes or dtypes do not fit together.
        UnavailableBackendError: if the backend asked for cannot run here.
    """
    return window_scores(queries, keys, scale, backend=backend)


def select(
    scores: Float32[mx.array, "batch kv_heads rows"], heavy: int, recent: int, *, backend: str | None = None
) -> UInt32[mx.array, "batch kv_heads heavy+recent"]:
    """Select the `heavy` highest scores before the last `recent` rows, and these: ascending, ties to the lowest row.

    Args:
        scores: one of each row.
        heavy: rows to keep for their scores.
        recent: last rows, which are always kept.
        backend: as in `column_sums`.

    Raises:
        ValueError: if there are fewer rows than heavy + recent.
        UnavailableBackendError: if the backend asked for cannot run here.
    """
    rows = scores.shape[-1]
    if heavy < 0 or recent < 0 or not 0 < heavy + recent <= rows:
        raise ValueError(f"[h2o] expected heavy + recent from 1 to {rows} rows, got {heavy} + {recent}")
    return select_rows(scores, heavy + recent, recent, backend=backend)
