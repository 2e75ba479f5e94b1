"""Merging the outputs of splits, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import resolve_backend

from . import reference
from .kernel import PACKAGE, MergeKernel

if TYPE_CHECKING:
    from jaxtyping import Float

    from mlx_kv.layout import Format

_INPUTS, TEMPLATE = ("partial", "sinks"), ("T", "DIM", "SINKS", "SINK_COUNT", "SIMDGROUPS")
MERGE_SPLITS = MergeKernel("merge_splits", PACKAGE, _INPUTS, ("output",), template=TEMPLATE)
_SIMDGROUPS = 16


@cache
def merge_kernel(format: Format) -> MergeKernel:
    """Return the kernel for a format's values, which takes the inputs that leaving their basis needs."""
    if not format.basis_sources:
        return MERGE_SPLITS
    return MergeKernel(
        "merge_splits",
        PACKAGE,
        (*_INPUTS, *format.basis_inputs),
        ("output",),
        template=(*TEMPLATE, *[name for name, _ in format.constants]),
        basis_sources=format.basis_sources,
    )


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
    partial: mx.array,
    sinks: mx.array | None,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    backend: str,
    format: Format | None = None,
    basis: Sequence[mx.array] = (),
) -> mx.array:
    """Merge [rows, splits, dim + 1], outputs and behind each its lse, into `shape`.

    One array for both: the host pays for each that a launch has. The sink of row i is sinks[i % len(sinks)]. With a
    format, outputs leave its basis, by the arrays of its `basis_inputs`.
    """
    rows, _, width = partial.shape
    kernel = MERGE_SPLITS if format is None else merge_kernel(format)
    constants = () if format is None or kernel is MERGE_SPLITS else format.constants
    return kernel(
        inputs=[partial, partial if sinks is None else sinks, *basis],
        template={
            "T": dtype,
            "DIM": width - 1,
            "SINKS": sinks is not None,
            "SINK_COUNT": 1 if sinks is None else sinks.size,
            "SIMDGROUPS": _SIMDGROUPS,
            **dict(constants),
        },
        grid=(rows * 32 * _SIMDGROUPS, 1, 1),
        threadgroup=(32 * _SIMDGROUPS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        backend=backend,
    )[0]
