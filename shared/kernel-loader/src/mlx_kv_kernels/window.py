"""Scores of rows by what the newest tokens' queries look at: what policies of a prompt's rows select by."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

from . import window_reference as reference
from .backend import ENVIRONMENT_VARIABLE, Backend, UnavailableBackendError, resolve_backend
from .kernel import Kernel
from .launch import Launch, launches
from .numbers import numbers
from .pooling import Pooling, pool_scores
from .rows import topk_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, UInt32

WINDOW_SCORES = Kernel(
    "window_scores",
    "mlx_kv_kernels",
    ("queries", "keys", "scale", "sinks", "bias", "statistics", "params"),
    ("out",),
    template=("T", "DIM", "QUERIES", "THREADS", "VOTES", "BIAS"),
    ensure_row_contiguous=False,
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
    query_heads, dim = queries.shape[1], queries.shape[3]
    factor = dim**-0.5 if scale is None else scale
    chosen = _choose(backend, dim, keys.dtype)
    if chosen == "reference":
        return reference.window_scores(queries, keys, factor, sinks, bias)
    none = numbers((0.0,), mx.float32)  # what stands for nothing is made once: each op costs the host a launch
    logits = numbers((-float("inf"),) * query_heads, mx.float32) if sinks is None else sinks.astype(mx.float32)
    biases = none if bias is None else mx.contiguous(bias)
    share, statistics, votes = _scorers(queries.shape, keys.shape, keys.dtype, biases.shape, chosen)
    before = [mx.contiguous(queries), keys, numbers((factor,), mx.float32), logits, biases]
    after = numbers((share,), mx.int32)
    (found,) = statistics([*before, none, after])
    return votes([*before, found, after])[0]


@launches
def _scorers(
    queries: tuple[int, ...], keys: tuple[int, ...], dtype: mx.Dtype, bias: tuple[int, ...], backend: Backend
) -> tuple[int, Launch, Launch]:
    """Return how many rows a threadgroup takes, and the launches of softmax statistics and of votes."""
    batch, query_heads, window, dim = queries
    _, kv_heads, rows, _ = keys
    total = query_heads // kv_heads * window
    fitting = max(_TILE_BYTES // (dim * dtype.size) // 8 * 8, 8)
    share = -(-rows // (_ROWS * _SPLITS)) * _ROWS
    splits = -(-rows // share)
    statistics = (batch * kv_heads, splits, total, 2)

    def launch(votes: bool, before: tuple[int, ...], out: tuple[int, ...]) -> Launch:
        return WINDOW_SCORES.prepare(
            inputs=[
                (dtype, queries),
                (dtype, keys),
                (mx.float32, (1,)),
                (mx.float32, (query_heads,)),
                (mx.float32, bias),
                (mx.float32, before),
                (mx.int32, (1,)),
            ],
            template={
                "T": dtype,
                "DIM": dim,
                "QUERIES": min(fitting, 64, -(-total // 8) * 8),
                "THREADS": _THREADS,
                "VOTES": votes,
                "BIAS": len(bias) == 3,
            },
            grid=(splits * _THREADS, batch * kv_heads, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[out],
            output_dtypes=[mx.float32],
            threadgroups_per_core=2 if dim * dtype.size <= 256 else None,  # a lane holds a quarter of two keys
            backend=backend,
        )

    return share, launch(False, (1,), statistics), launch(True, statistics, (batch, kv_heads, rows))


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
