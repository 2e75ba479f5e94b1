"""KIVI's four kernels: which arrays they take, and their launches."""

from __future__ import annotations

import logging
import math
import os
from functools import cache

import mlx.core as mx

from mlx_kv_kernels import Backend, Kernel, UnavailableBackendError, resolve_backend
from mlx_kv_kernels.backend import ENVIRONMENT_VARIABLE
from mlx_kv_kernels.kernel import CONSTANT_BELOW
from mlx_kv_kernels.launch import Launch, launches

from .reference import Quantized

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
GROUP_SIZES = (32, 64, 128, 256)
_THREADS = 128

_log = logging.getLogger("mlx_kv_kivi")


def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], *helpers: str) -> Kernel:
    template = ("T", "BITS", "GROUP")
    return Kernel(name, "mlx_kv_kivi", inputs, outputs, template, ensure_row_contiguous=False, helpers=helpers)


QUANTIZE_KEYS = _kernel("quantize_keys", ("x",), Quantized._fields, "group_scale")
QUANTIZE_VALUES = _kernel("quantize_values", ("x",), Quantized._fields, "group_scale")
DEQUANTIZE_KEYS = _kernel("dequantize_keys", Quantized._fields, ("x",))
DEQUANTIZE_VALUES = _kernel("dequantize_values", Quantized._fields, ("x",))


def choose(backend: str | None, channels: int, dtype: mx.Dtype, bits: int, group_size: int) -> Backend:
    """The backend for arrays of this kind; where "auto" finds no kernel for them, the reference.

    Raises:
        UnavailableBackendError: the backend asked for cannot run here, or its kernels do not take such arrays.
    """
    chosen = resolve_backend(backend)
    reason = _unfit(channels, dtype, bits, group_size)
    if chosen == "reference" or not reason:
        return chosen
    if (backend or os.environ.get(ENVIRONMENT_VARIABLE) or "auto") != "auto":
        raise UnavailableBackendError(f"[kivi] backend {chosen!r} was asked for and has no kernel: {reason}")
    _log_once(reason)
    return "reference"


def quantize_keys(x: mx.array, bits: int, group_size: int, backend: Backend) -> Quantized:
    """Launch `quantize_keys`; a thread takes 8 rows of 8 channels."""
    return Quantized(*_key_quantizer(x.shape, x.dtype, bits, group_size, backend)([x.reshape(_four_axes(x.shape))]))


def quantize_values(x: mx.array, bits: int, group_size: int, backend: Backend) -> Quantized:
    """Launch `quantize_values`; a thread takes 32 channels of a row."""
    return Quantized(*_value_quantizer(x.shape, x.dtype, bits, group_size, backend)([x.reshape(_four_axes(x.shape))]))


@launches
def _key_quantizer(shape: tuple[int, ...], dtype: mx.Dtype, bits: int, group_size: int, backend: Backend) -> Launch:
    *batch, rows, channels = shape
    scale_shape = (*batch, rows // group_size, channels)
    return _quantizer(QUANTIZE_KEYS, shape, dtype, bits, group_size, scale_shape, rows * channels // 64, backend)


@launches
def _value_quantizer(shape: tuple[int, ...], dtype: mx.Dtype, bits: int, group_size: int, backend: Backend) -> Launch:
    *batch, rows, channels = shape
    scale_shape = (*batch, rows, channels // group_size)
    return _quantizer(QUANTIZE_VALUES, shape, dtype, bits, group_size, scale_shape, rows * channels // 32, backend)


def dequantize_keys(quantized: Quantized, bits: int, group_size: int, backend: Backend) -> mx.array:
    """Launch `dequantize_keys`; a thread takes 8 rows of 8 channels."""
    *batch, groups, channels = quantized.scale.shape
    shape = (*batch, groups * group_size, channels)
    return _dequantize(
        DEQUANTIZE_KEYS, quantized, bits, group_size, shape, groups * group_size * channels // 64, backend
    )


def dequantize_values(quantized: Quantized, bits: int, group_size: int, backend: Backend) -> mx.array:
    """Launch `dequantize_values`; a thread takes 8 channels of 4 rows, fewer at the end."""
    *batch, rows, groups = quantized.scale.shape
    shape = (*batch, rows, groups * group_size)
    threads = -(-rows // 4) * groups * group_size // 8
    return _dequantize(DEQUANTIZE_VALUES, quantized, bits, group_size, shape, threads, backend)


def _quantizer(
    kernel: Kernel,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    bits: int,
    group_size: int,
    scale_shape: tuple[int, ...],
    threads: int,
    backend: Backend,
) -> Launch:
    *batch, channels = shape
    four = _four_axes(shape)
    return kernel.prepare(
        inputs=[(dtype, four)],
        template={"T": dtype, "BITS": bits, "GROUP": group_size},
        grid=_grid(threads, four),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*batch, channels * bits // 32), scale_shape, scale_shape],
        output_dtypes=[mx.uint32, dtype, dtype],
        backend=backend,
    )


def _dequantize(
    kernel: Kernel,
    quantized: Quantized,
    bits: int,
    group_size: int,
    shape: tuple[int, ...],
    threads: int,
    backend: Backend,
) -> mx.array:
    codes, scale, minimum = (array.reshape(_four_axes(array.shape)) for array in quantized)
    grid = _grid(threads, codes.shape)
    if codes.size < CONSTANT_BELOW:  # so few would lie in Metal's constant memory, which has other pointers
        codes = mx.pad(codes, [(0, 0), (0, 0), (0, CONSTANT_BELOW), (0, 0)])
    return kernel(
        inputs=[codes, scale, minimum],
        template={"T": scale.dtype, "BITS": bits, "GROUP": group_size},
        grid=grid,
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[scale.dtype],
        backend=backend,
    )[0]


def _four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as [batch, heads, rows, channels]."""
    return shape if len(shape) == 4 else (math.prod(shape[:-3]), *(1,) * (3 - len(shape)), *shape[-3:])


def _grid(threads: int, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Threads for one head, by heads and batch."""
    batch, heads, _, _ = shape
    return -(-threads // _THREADS) * _THREADS, heads, batch


def _unfit(channels: int, dtype: mx.Dtype, bits: int, group_size: int) -> str:
    if dtype not in DTYPES:
        return f"expected float32, float16 or bfloat16, got {dtype}"
    if group_size not in GROUP_SIZES:
        return f"expected group_size in {GROUP_SIZES}, got {group_size}"
    if channels % 8 or bits * channels % 32:
        return f"expected channels in eights whose {bits}-bit codes fill 32-bit words, got {channels}"
    return ""


@cache
def _log_once(reason: str) -> None:
    _log.warning("KIVI runs as plain MLX ops: its kernels do not take this. %s", reason)
