"""The cases of KIVI's kernels for `mlx_kv selftest`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import mlx.core as mx

from mlx_kv_kernels import Backend
from mlx_kv_kernels.selftest import Case

from .config import BITS, GROUP_SIZES
from .launch import DTYPES
from .quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values

_SIDES = {
    "keys": (quantize_keys, dequantize_keys),
    "values": (quantize_values, dequantize_values),
}


def cases() -> list[Case]:
    """Every kernel in every dtype, width and group size that a store uses."""
    return [
        Case(kernel, f"{str(dtype).removeprefix('mlx.core.')}, {bits} bit, group {group_size}", run)
        for side, dtype, bits, group_size in product(_SIDES, DTYPES, BITS, GROUP_SIZES)
        for kernel, run in _runs(side, dtype, bits, group_size)
    ]


def _runs(side: str, dtype: mx.Dtype, bits: int, group_size: int) -> Sequence[tuple[str, Callable[[Backend], None]]]:
    quantize, dequantize = _SIDES[side]

    def run_quantize(backend: Backend) -> None:
        x = _rows(dtype)
        got = quantize(x, bits, group_size, backend=backend)
        for name, a, b in zip(got._fields, got, quantize(x, bits, group_size, backend="reference"), strict=True):
            _expect_equal(name, a, b)

    def run_dequantize(backend: Backend) -> None:
        packed = quantize(_rows(dtype), bits, group_size, backend="reference")
        got = dequantize(packed, bits, group_size, backend=backend)
        _expect_equal("x", got, dequantize(packed, bits, group_size, backend="reference"))

    return (f"quantize_{side}", run_quantize), (f"dequantize_{side}", run_dequantize)


def _rows(dtype: mx.Dtype) -> mx.array:
    """Rows [1, 2, 256, 128], of which some are constant, of few values (ties), huge, infinite or not a number."""
    x = mx.random.normal((1, 2, 256, 128), key=mx.random.key(0))
    x[..., 16:32] = 0.1
    x[..., 32:48] = mx.round(x[..., 32:48])
    x[..., 48:56] *= 1e4
    x[:, 0, 7, 60] = float("nan")
    x[:, 1, 130, 61] = -float("inf")
    x[:, 0, 140] = -0.0
    return x.astype(dtype)


def _expect_equal(name: str, got: mx.array, expected: mx.array) -> None:
    if not mx.array_equal(got, expected, equal_nan=name != "codes"):
        count = mx.sum((got != expected) & ~((got != got) & (expected != expected))).item()
        raise ValueError(f"[kivi] expected the reference's {name}, got {count} other elements")
