"""The public quantisation functions: checks, then the kernel or its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import launch, reference
from .config import BITS
from .reference import Quantized

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float


def quantize_keys(
    x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int, *, backend: str | None = None
) -> Quantized:
    """Quantise per channel: a group is `group_size` consecutive rows of one channel.

    Args:
        x: keys [..., rows, channels], float32, float16 or bfloat16; a view of a larger buffer is read in place.
        bits: 2, 3, 4 or 8.
        group_size: any divisor of rows; the kernels take 32, 64, 128 and 256.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto). "auto" takes
            the reference for what no kernel takes, and says so once through logging.

    Returns:
        Packed codes [..., rows, ceil(channels * bits / 32)], scale and minimum [..., rows / group_size, channels].

    Raises:
        ValueError: if bits or group_size do not fit.
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for this array.
    """
    _check(bits, "rows", x.shape[-2], group_size)
    chosen = launch.choose(backend, x.shape[-1], x.dtype, bits, group_size)
    if chosen == "reference" or not x.size:
        return reference.quantize_keys(x, bits, group_size)
    return launch.quantize_keys(x, bits, group_size, chosen)


def dequantize_keys(
    quantized: Quantized, bits: int, group_size: int, *, backend: str | None = None
) -> Float[mx.array, "*batch rows channels"]:
    """Return code * scale + minimum for every key, in the dtype of the scale.

    Args:
        quantized: what `quantize_keys` returned, or views of it.
        bits: as given to `quantize_keys`.
        group_size: as given to `quantize_keys`.
        backend: as for `quantize_keys`.

    Raises:
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for these arrays.
    """
    scale = quantized.scale
    chosen = launch.choose(backend, scale.shape[-1], scale.dtype, bits, group_size)
    if chosen == "reference" or not scale.size:
        return reference.dequantize_keys(quantized, bits, group_size)
    return launch.dequantize_keys(quantized, bits, group_size, chosen)


def quantize_values(
    x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int, *, backend: str | None = None
) -> Quantized:
    """Quantise per token: a group is `group_size` consecutive channels of one row.

    Args:
        x: values [..., rows, channels], float32, float16 or bfloat16; a view of a larger buffer is read in place.
        bits: 2, 3, 4 or 8.
        group_size: any divisor of channels; the kernels take 32, 64, 128 and 256.
        backend: as for `quantize_keys`.

    Returns:
        Packed codes [..., rows, ceil(channels * bits / 32)], scale and minimum [..., rows, channels / group_size].

    Raises:
        ValueError: if bits or group_size do not fit.
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for this array.
    """
    _check(bits, "channels", x.shape[-1], group_size)
    chosen = launch.choose(backend, x.shape[-1], x.dtype, bits, group_size)
    if chosen == "reference" or not x.size:
        return reference.quantize_values(x, bits, group_size)
    return launch.quantize_values(x, bits, group_size, chosen)


def dequantize_values(
    quantized: Quantized, bits: int, group_size: int, *, backend: str | None = None
) -> Float[mx.array, "*batch rows channels"]:
    """Return code * scale + minimum for every value, in the dtype of the scale.

    Args:
        quantized: what `quantize_values` returned, or views of it.
        bits: as given to `quantize_values`.
        group_size: as given to `quantize_values`.
        backend: as for `quantize_keys`.

    Raises:
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for these arrays.
    """
    scale = quantized.scale
    chosen = launch.choose(backend, scale.shape[-1] * group_size, scale.dtype, bits, group_size)
    if chosen == "reference" or not scale.size:
        return reference.dequantize_values(quantized, bits, group_size)
    return launch.dequantize_values(quantized, bits, group_size, chosen)


def _check(bits: int, axis: str, length: int, group_size: int) -> None:
    if bits not in BITS:
        raise ValueError(f"[kivi] expected bits in {BITS}, got {bits}")
    if group_size < 1 or length % group_size:
        raise ValueError(f"[kivi] expected {axis} divisible by group_size {group_size}, got {length}")
