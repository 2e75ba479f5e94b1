"""Merging the outputs of splits, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import Kernel, resolve_backend

from . import reference

if TYPE_CHECKING:
    from jaxtyping import Float

MERGE_SPLITS = Kernel(
    "merge_splits",
    "mlx_kv_fused_attention",
    ("outputs", "lse", "sinks"),
    ("output", "total"),
    template=("T", "DIM", "SINKS", "SINK_COUNT", "SIMDGROUPS"),
)
_SIMDGROUPS = 16


def merge_splits(
    outputs: Float[mx.array, "*batch splits dim"],
    lse: Float[mx.array, "*batch splits"],
    *,
    backend: str | None = None,
) -> tuple[Float[mx.array, "*batch dim"], Float[mx.array, "*batch"]]:
    """Merge attention outputs over disjoint sets of rows, as if all rows had been attended to at once.

    Args:
        outputs: float32, each already divided by its own sum of weights.
        lse: float32 logarithms to base 2 of those sums; an empty split is (-inf, 0).
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        The merged output and lse, float32.

    Raises:
        ValueError: shapes or dtypes do not fit.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    if outputs.shape[:-1] != lse.shape or lse.size == 0:
        raise ValueError(
            f"[merge_splits] expected outputs [..., splits, dim] and lse [..., splits], got {list(outputs.shape)} and "
            f"{list(lse.shape)}"
        )
    if outputs.dtype != mx.float32 or lse.dtype != mx.float32:
        raise ValueError(f"[merge_splits] expected float32, got {outputs.dtype} and {lse.dtype}")
    backend = resolve_backend(backend)
    if backend == "reference":
        return reference.merge_splits(outputs, lse)
    *batch, splits, dim = outputs.shape
    output, total = launch_merge(
        outputs.reshape(-1, splits, dim), lse.reshape(-1, splits), None, (*batch, dim), mx.float32, backend
    )
    return output, total.reshape(batch)


def launch_merge(
    outputs: mx.array,
    lse: mx.array,
    sinks: mx.array | None,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    backend: str,
) -> list[mx.array]:
    """Merge [rows, splits, dim] into `shape`, and lse [rows]; the sink of row i is sinks[i % len(sinks)]."""
    rows, _, dim = outputs.shape
    return MERGE_SPLITS(
        inputs=[outputs, lse, lse if sinks is None else sinks],
        template={
            "T": dtype,
            "DIM": dim,
            "SINKS": sinks is not None,
            "SINK_COUNT": 1 if sinks is None else sinks.size,
            "SIMDGROUPS": _SIMDGROUPS,
        },
        grid=(rows * 32 * _SIMDGROUPS, 1, 1),
        threadgroup=(32 * _SIMDGROUPS, 1, 1),
        output_shapes=[shape, (rows,)],
        output_dtypes=[dtype, mx.float32],
        backend=backend,
    )
