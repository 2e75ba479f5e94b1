"""The public selection: checks, then the kernels or their reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mlx_kv_kernels.pooling import POOLINGS, Pooling
from mlx_kv_kernels.window import select_window_rows

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float, UInt32


def select(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    budget: int,
    window: int = 32,
    kernel_size: int = 7,
    pooling: str = "max",
    *,
    backend: str | None = None,
) -> UInt32[mx.array, "batch kv_heads budget"]:
    """Select the rows of each KV head that SnapKV keeps, ascending (arXiv 2404.14469, section 4.1).

    Args:
        queries: the last `window` tokens' queries, after RoPE.
        keys: the keys of all rows, after RoPE, in the queries' dtype.
        budget: rows to keep, the window included.
        window: last rows, which are always kept.
        kernel_size: neighbouring rows that votes are pooled over; odd.
        pooling: "max" or "avg".
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        Row indices. Equal scores go to the lowest row.

    Raises:
        ValueError: if the arguments do not fit together.
        UnavailableBackendError: if the backend asked for cannot run here.
    """
    _expect(queries.ndim == 4 and keys.ndim == 4, "queries and keys of four axes", (queries.ndim, keys.ndim))
    _expect(queries.shape[2] == window > 0, f"queries of the window's {window} rows", queries.shape[2])
    _expect(window <= budget <= keys.shape[2], f"budget from window {window} to {keys.shape[2]} rows", budget)
    _expect(kernel_size > 0 and kernel_size % 2 == 1, "kernel_size odd", kernel_size)
    _expect(pooling in POOLINGS, f"pooling in {POOLINGS}", repr(pooling))
    return select_window_rows(queries, keys, budget, window, kernel_size, cast("Pooling", pooling), backend=backend)


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[snapkv] expected {expected}, got {got}")
