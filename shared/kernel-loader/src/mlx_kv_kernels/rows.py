"""Top-k of rows and gathering of rows, what every method that evicts rows needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

import mlx.core as mx

from . import reference
from .backend import Backend, resolve_backend
from .kernel import CONSTANT_BELOW, Kernel
from .launch import Launch, launches
from .numbers import numbers

if TYPE_CHECKING:
    from jaxtyping import Float32, Int, Shaped, UInt32

TOPK_ROWS = Kernel("topk_rows", "mlx_kv_kernels", ("scores", "params"), ("indices",), template=("THREADS",))
GATHER_ROWS = Kernel(
    "gather_rows",
    "mlx_kv_kernels",
    ("rows", "indices"),
    ("gathered",),
    template=("T", "WIDTH", "BYTES"),
    ensure_row_contiguous=False,
)
_GATHER_THREADS = 256


def topk_rows(
    scores: Float32[mx.array, "batch kv_heads rows"],
    k: int,
    lengths: Int[mx.array, " batch"] | Sequence[int] | None = None,
    *,
    backend: str | None = None,
) -> UInt32[mx.array, "batch kv_heads k"]:
    """The rows of the k highest scores of each head, in ascending order; exact, ties go to the lowest row.

    Args:
        scores: one finite or infinite number a row; NaN loses to everything, -infinity too. -0 equals +0.
        k: rows to keep, 1 <= k <= rows.
        lengths: valid rows of each sequence (default: all). Rows behind them lose to every valid row, NaN included,
            so a sequence shorter than k keeps all its rows and then rows length, length + 1, ... as filling.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Raises:
        ValueError: shapes, dtype or k do not fit.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    if scores.ndim != 3 or scores.dtype != mx.float32:
        raise ValueError(
            f"[topk_rows] expected scores float32 [batch, kv_heads, rows], got {scores.dtype} {list(scores.shape)}"
        )
    batch, _, rows = scores.shape
    if not 1 <= k <= rows:
        raise ValueError(f"[topk_rows] expected 1 <= k <= {rows} rows, got {k}")
    if lengths is not None and not isinstance(lengths, mx.array):
        lengths = mx.array(list(lengths), dtype=mx.int32)
    if lengths is not None and lengths.shape != (batch,):
        raise ValueError(f"[topk_rows] expected lengths [{batch}], got {list(lengths.shape)}")
    backend = resolve_backend(backend)
    if backend == "reference":
        return reference.topk_rows(scores, k, lengths)
    if lengths is None:
        params = numbers((k, *[rows] * batch), mx.int32)
    else:
        params = mx.concatenate([numbers((k,), mx.int32), mx.clip(lengths, 0, rows).astype(mx.int32)])
    scores = _in_device_memory(scores)
    return _topk(scores.shape, k, backend)([scores, params])[0]


@launches
def _topk(scores: tuple[int, ...], k: int, backend: Backend) -> Launch:
    batch, kv_heads, rows = scores
    threads = 256 if rows <= 2048 else 1024
    return TOPK_ROWS.prepare(
        inputs=[(mx.float32, scores), (mx.int32, (1 + batch,))],
        template={"THREADS": threads},
        grid=(batch * kv_heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, kv_heads, k)],
        output_dtypes=[mx.uint32],
        backend=backend,
    )


def gather_rows(
    rows: Shaped[mx.array, "batch kv_heads rows width"],
    indices: Int[mx.array, "batch kv_heads k"],
    *,
    backend: str | None = None,
) -> Shaped[mx.array, "batch kv_heads k width"]:
    """The rows that `indices` names, in its order.

    Args:
        rows: any dtype of 1 to 8 bytes; a view of a larger buffer is read in place, not copied.
        indices: int32 or uint32 in [0, rows); values outside are undefined, as in mx.take_along_axis.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Raises:
        ValueError: shapes or dtypes do not fit.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    if rows.ndim != 4 or rows.size == 0:
        raise ValueError(f"[gather_rows] expected rows [batch, kv_heads, rows, width], got {list(rows.shape)}")
    batch, kv_heads = rows.shape[:2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, kv_heads) or indices.size == 0:
        raise ValueError(f"[gather_rows] expected indices [{batch}, {kv_heads}, k], got {list(indices.shape)}")
    if indices.dtype not in (mx.int32, mx.uint32):
        raise ValueError(f"[gather_rows] expected indices int32 or uint32, got {indices.dtype}")
    backend = resolve_backend(backend)
    if backend == "reference":
        return reference.gather_rows(rows, indices)
    rows = _in_device_memory(rows)
    return _gatherer(rows.shape, rows.dtype, indices.shape, indices.dtype, backend)([rows, mx.contiguous(indices)])[0]


@launches
def _gatherer(
    rows: tuple[int, ...], dtype: mx.Dtype, indices: tuple[int, ...], of_indices: mx.Dtype, backend: Backend
) -> Launch:
    batch, kv_heads, k = indices
    width = rows[3]
    chunk_bytes = gcd(16, width * dtype.size)
    chunks = k * width * dtype.size // chunk_bytes
    return GATHER_ROWS.prepare(
        inputs=[(dtype, rows), (of_indices, indices)],
        template={"T": dtype, "WIDTH": width, "BYTES": chunk_bytes},
        grid=(-(-chunks // _GATHER_THREADS) * _GATHER_THREADS, batch * kv_heads, 1),
        threadgroup=(_GATHER_THREADS, 1, 1),
        output_shapes=[(batch, kv_heads, k, width)],
        output_dtypes=[dtype],
        backend=backend,
    )


def _in_device_memory(x: mx.array) -> mx.array:
    """`x`, with rows behind it where Metal would hold so few elements in constant memory, which has other pointers."""
    if x.size >= CONSTANT_BELOW:
        return x
    axis = 2
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, CONSTANT_BELOW)
    return mx.pad(x, padding)
