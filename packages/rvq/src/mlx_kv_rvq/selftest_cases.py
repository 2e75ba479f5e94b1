"""The cases of RVQ's kernels for `mlx_kv selftest`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import mlx.core as mx

from mlx_kv_kernels import Backend
from mlx_kv_kernels.selftest import Case

from .codec import decode, encode
from .config import BITS, BLOCK
from .launch import DTYPES
from .rotation import HEAD_DIMS

_TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}  # of a row: MLX's transform adds in another order


def cases() -> list[Case]:
    """Every dtype with every head dim, and every width; both kernels, centred and not."""
    variants = [
        *((dtype, dim, 2, 1, center) for dtype, dim, center in product(DTYPES, HEAD_DIMS, (True, False))),
        *((mx.float16, 128, bits, stages, False) for bits, stages in product(BITS, (1, 3))),
    ]
    return [
        Case(kernel, _name(*variant), run)
        for variant in dict.fromkeys(variants)
        for kernel, run in (("encode", _encode(*variant)), ("decode", _decode(*variant)))
    ]


def _name(dtype: mx.Dtype, dim: int, bits: int, stages: int, center: bool) -> str:
    kind = str(dtype).removeprefix("mlx.core.")
    return f"{kind}, head dim {dim}, {stages} x {bits} bit{', centred' if center else ''}"


def _encode(dtype: mx.Dtype, dim: int, bits: int, stages: int, center: bool) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        got, right = (
            encode(_rows(dtype, dim), bits, stages, center=center, backend=name) for name in (backend, "reference")
        )
        for name, a, b in zip(got._fields, got, right, strict=True):
            if a is not None and b is not None and not mx.array_equal(a, b, equal_nan=name != "codes"):
                raise ValueError(f"[rvq] expected the reference's {name}, got {mx.sum(a != b).item()} other elements")

    return run


def _decode(dtype: mx.Dtype, dim: int, bits: int, stages: int, center: bool) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        encoded = encode(_rows(dtype, dim), bits, stages, center=center, backend="reference")
        got, right = (
            decode(encoded, bits, stages, channels=dim, dtype=dtype, backend=name).astype(mx.float32)
            for name in (backend, "reference")
        )
        difference, size = float(mx.abs(got - right).max()), float(mx.abs(right).max())
        if not difference <= _TOLERANCE[dtype] * size:  # NaN too
            raise ValueError(f"[rvq] expected the reference's rows, got a difference of {difference}")

    return run


def _rows(dtype: mx.Dtype, dim: int) -> mx.array:
    """Rows [1, 2, 256, dim], some of them constant or zero, with a bias in a few channels."""
    x = mx.random.normal((1, 2, 2 * BLOCK, dim), key=mx.random.key(0))
    x[..., 3] += 40
    x[:, 0, 7], x[:, 1, 130] = 0.1, 0
    return x.astype(dtype)
