"""Scores of rows by what the newest tokens' queries look at: what policies of a prompt's rows select by."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from . import window_reference as reference
from .backend import ENVIRONMENT_VARIABLE, Backend, UnavailableBackendError, resolve_backend
from .kernel import Kernel
from .numbers import numbers
from .rows import topk_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, UInt32

Pooling = Literal["max", "avg"]
POOLINGS: tuple[Pooling, ...] = ("max", "avg")

WINDOW_SCORES = Kernel(
    "window_scores",
    "mlx_kv_kernels",
    ("queries", "keys", "scale", "sinks", "bias", "statistics", "params"),
    ("out",),
    template=("T", "DIM", "QUERIES", "THREADS", "VOTES", "BIAS"),
    ensure_row_contiguous=False,
)
POOL_SCORES = Kernel(
    "pool_scores", "mlx_kv_kernels", ("votes", "params"), ("out",), template=("KERNEL", "MEAN", "THREADS")
)
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_THREADS = 256
_TILE_BYTES = 16384  # queries in threadgroup memory
_ROWS = 16 * _THREADS // 32  # rows that a threadgroup has in hand at a time
_SPLITS = 32  # threadgroups that share one KV head's rows, at most

_log = logging.getLogger("mlx_kv_kernels")


def window_scores(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    scale: float | None = None,
    sinks: Float[mx.array, " query_heads"] | None = None,
    bias: Float32[mx.array, "batch query_heads rows"] | None = None,
    *,
    backend: str | None = None,
) -> Float32[mx.array, "batch kv_heads rows"]:
    """The attention each row gets from the newest tokens' queries: summed over the queries, the mean over the group.

    The queries are those of the last `window` rows and see the rows up to their own. Softmax in float32 over all rows
    (SnapKV, arXiv 2404.14469, section 4.1). On a GPU no array larger than the scores is made.

    Args:
        queries: after RoPE, in the keys' dtype.
        keys: after RoPE; a view of a larger buffer is read in place.
        scale: what dot products are multiplied with (default: key_dim**-0.5).
        sinks: logits that join the softmax without a row, one per query head (default: none).
        bias: what is added to the scaled dot products of a row, for each query head (default: nothing).
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Raises:
        ValueError: shapes or dtypes do not fit.
        UnavailableBackendError: the backend asked for cannot run here, or has no kernel for this dtype or key_dim.
    """
    _check(queries, keys, sinks, bias)
    batch, query_heads, window, dim = queries.shape
    _, kv_heads, rows, _ = keys.shape
    factor = dim**-0.5 if scale is None else scale
    chosen = _choose(backend, dim, keys.dtype)
    if chosen == "reference":
        return reference.window_scores(queries, keys, factor, sinks, bias)
    total = query_heads // kv_heads * window
    fitting = max(_TILE_BYTES // (dim * keys.itemsize) // 8 * 8, 8)
    share = -(-rows // (_ROWS * _SPLITS)) * _ROWS
    splits = -(-rows // share)
    none = numbers((0.0,), mx.float32)  # what stands for nothing is made once: each op costs the host a launch
    logits = numbers((-float("inf"),) * query_heads, mx.float32) if sinks is None else sinks.astype(mx.float32)
    biases = none if bias is None else mx.contiguous(bias)
    contiguous = mx.contiguous(queries)

    def launch(votes: bool, statistics: mx.array, shape: tuple[int, ...]) -> mx.array:
        return WINDOW_SCORES(
            inputs=[
                contiguous,
                keys,
                numbers((factor,), mx.float32),
                logits,
                biases,
                statistics,
                numbers((share,), mx.int32),
            ],
            template={
                "T": keys.dtype,
                "DIM": dim,
                "QUERIES": min(fitting, 64, -(-total // 8) * 8),
                "THREADS": _THREADS,
                "VOTES": votes,
                "BIAS": bias is not None,
            },
            grid=(splits * _THREADS, batch * kv_heads, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[mx.float32],
            backend=chosen,
        )[0]

    statistics = launch(False, none, (batch * kv_heads, splits, total, 2))
    return launch(True, statistics, (batch, kv_heads, rows))


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
    batch, kv_heads, rows = votes.shape
    if not 0 <= window <= rows or sinks < 0:
        raise ValueError(
            f"[pool_scores] expected window from 0 to {rows} rows and sinks of 0 or more, got {window}, {sinks}"
        )
    chosen = resolve_backend(backend)
    if chosen == "reference":
        return reference.pool_scores(votes, window, kernel_size, pooling, sinks)
    return POOL_SCORES(
        inputs=[votes, numbers((sinks, window), mx.int32)],
        template={"KERNEL": kernel_size, "MEAN": pooling == "avg", "THREADS": _THREADS},
        grid=(-(-rows // _THREADS) * _THREADS, batch * kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, kv_heads, rows)],
        output_dtypes=[mx.float32],
        backend=chosen,
    )[0]


def select_window_rows(
    queries: Float[mx.array, "batch query_heads window key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    budget: int,
    window: int,
    kernel_size: int,
    pooling: Pooling,
    *,
    sinks: int = 0,
    scale: float | None = None,
    attention_sinks: Float[mx.array, " query_heads"] | None = None,
    backend: str | None = None,
) -> UInt32[mx.array, "batch kv_heads budget"]:
    """The rows of each KV head to keep, ascending: the last `window`, and those that the newest queries look at most.

    `budget` counts all rows kept and is at most the rows there are; the first `sinks` rows come before others. The
    remaining arguments and the errors are those of `window_scores` (whose `sinks` is `attention_sinks` here),
    `pool_scores` and `topk_rows`. `window` may exceed the number of queries.
    """
    votes = window_scores(queries, keys, scale, attention_sinks, backend=backend)
    sinks = min(sinks, budget - window)
    scores = pool_scores(votes, window, kernel_size, pooling, sinks, backend=backend)
    return topk_rows(scores, budget, backend=backend)


def _check(queries: mx.array, keys: mx.array, sinks: mx.array | None, bias: mx.array | None) -> None:
    if queries.ndim != 4 or keys.ndim != 4:
        raise ValueError(
            "[window_scores] expected queries [batch, query_heads, window, key_dim] and keys [batch, kv_heads, rows, "
            f"key_dim], got {list(queries.shape)} and {list(keys.shape)}"
        )
    batch, query_heads, window, dim = queries.shape
    if keys.shape[0] != batch or keys.shape[3] != dim or query_heads % keys.shape[1] or 0 in queries.shape:
        raise ValueError(
            f"[window_scores] expected keys [{batch}, a divisor of {query_heads}, rows, {dim}], got {list(keys.shape)}"
        )
    if window > keys.shape[2]:
        raise ValueError(f"[window_scores] expected at least as many rows as queries, {window}, got {keys.shape[2]}")
    if queries.dtype != keys.dtype:
        raise ValueError(f"[window_scores] expected queries in the keys' dtype {keys.dtype}, got {queries.dtype}")
    if sinks is not None and sinks.shape != (query_heads,):
        raise ValueError(f"[window_scores] expected sinks [{query_heads}], got {list(sinks.shape)}")
    if bias is not None and (bias.shape != (batch, query_heads, keys.shape[2]) or bias.dtype != mx.float32):
        raise ValueError(
            f"[window_scores] expected bias float32 {[batch, query_heads, keys.shape[2]]}, "
            f"got {bias.dtype} {list(bias.shape)}"
        )


def _choose(backend: str | None, dim: int, dtype: mx.Dtype) -> Backend:
    """The backend; where "auto" finds no kernel for these arrays, the reference."""
    chosen = resolve_backend(backend)
    if chosen == "reference" or (dim % 16 == 0 and dim <= 256 and dtype in _DTYPES):
        return chosen
    reason = f"expected key_dim a multiple of 16 up to 256 in float32, float16 or bfloat16, got {dim} in {dtype}"
    if (backend or os.environ.get(ENVIRONMENT_VARIABLE) or "auto") != "auto":
        raise UnavailableBackendError(f"[window_scores] backend {chosen!r} was asked for and has no kernel: {reason}")
    _log_once(reason)
    return "reference"


@cache
def _log_once(reason: str) -> None:
    _log.warning("Window scores run as plain MLX ops: the kernel does not take this. %s", reason)
