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
    ("partial", "sinks"),
    ("output",),
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
    partial = mx.concatenate([outputs, lse[..., None]], axis=-1).reshape(-1, splits, dim + 1)
    output = launch_merge(partial, None, (*batch, dim), mx.float32, backend)
    return output, reference.merged_lse(lse)


def launch_merge(
    partial: mx.array, sinks: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype, backend: str
) -> mx.array:
    """Merge [rows, splits, dim + 1], outputs and behind each its lse, into `shape`.

    One array for both: the host pays for each that a launch has. The sink of row i is sinks[i % len(sinks)].
    """
    rows, _, width = partial.shape
    return MERGE_SPLITS(
        inputs=[partial, partial if sinks is None else sinks],
        template={
            "T": dtype,
            "DIM": width - 1,
            "SINKS": sinks is not None,
            "SINK_COUNT": 1 if sinks is None else sinks.size,
            "SIMDGROUPS": _SIMDGROUPS,
        },
        grid=(rows * 32 * _SIMDGROUPS, 1, 1),
        threadgroup=(32 * _SIMDGROUPS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        backend=backend,
    )[0]
