"""Votes pooled over neighbouring rows, so that what stands beside a row that is looked at is kept with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from . import window_reference as reference
from .backend import Backend, resolve_backend
from .kernel import Kernel
from .launch import Launch, launches
from .numbers import numbers

if TYPE_CHECKING:
    from jaxtyping import Float32

Pooling = Literal["max", "avg"]
POOLINGS: tuple[Pooling, ...] = ("max", "avg")

POOL_SCORES = Kernel(
    "pool_scores", "mlx_kv_kernels", ("votes", "params"), ("out",), template=("KERNEL", "MEAN", "THREADS")
)
_THREADS = 256


def pool_scores(
    votes: Float32[mx.array, "batch kv_heads rows"],
    window: int,
    kernel_size: int,
    pooling: Pooling,
    sinks: int = 0,
    *,
    backend: str | None = None,
) -> Float32[mx.array, "batch kv_heads rows"]:
    """Pool the votes of the rows before the window over their neighbours; rows that are always kept get +infinity.

    Args:
        votes: what `window_scores` returns.
        window: last rows, which are always kept; those before see them as absent.
        kernel_size: neighbours pooled over, the row itself included; odd.
        pooling: "max", or "avg", in which absent neighbours count as zero.
        sinks: first rows, which are always kept.
        backend: as in `window_scores`.

    Raises:
        ValueError: an argument does not fit.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    if votes.ndim != 3 or votes.dtype != mx.float32:
        raise ValueError(
            f"[pool_scores] expected votes float32 [batch, kv_heads, rows], got {votes.dtype} {list(votes.shape)}"
        )
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"[pool_scores] expected kernel_size odd, got {kernel_size}")
    if pooling not in POOLINGS:
        raise ValueError(f"[pool_scores] expected pooling in {POOLINGS}, got {pooling!r}")
    rows = votes.shape[2]
    if not 0 <= window <= rows or sinks < 0:
        raise ValueError(
            f"[pool_scores] expected window from 0 to {rows} rows and sinks of 0 or more, got {window}, {sinks}"
        )
    chosen = resolve_backend(backend)
    if chosen == "reference":
        return reference.pool_scores(votes, window, kernel_size, pooling, sinks)
    return _pooler(votes.shape, kernel_size, pooling, chosen)([votes, numbers((sinks, window), mx.int32)])[0]


@launches
def _pooler(votes: tuple[int, ...], kernel_size: int, pooling: Pooling, backend: Backend) -> Launch:
    batch, kv_heads, rows = votes
    return POOL_SCORES.prepare(
        inputs=[(mx.float32, votes), (mx.int32, (2,))],
        template={"KERNEL": kernel_size, "MEAN": pooling == "avg", "THREADS": _THREADS},
        grid=(-(-rows // _THREADS) * _THREADS, batch * kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[votes],
        output_dtypes=[mx.float32],
        backend=backend,
    )
