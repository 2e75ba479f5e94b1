"""The public quantisation functions: checks, then the kernel or its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import reference
from .config import BITS
from .reference import Quantized

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float


def quantize_keys(x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int) -> Quantized:
    """Quantise per channel: a group is `group_size` consecutive rows of one channel.

    Args:
        x: keys [..., rows, channels], float32, float16 or bfloat16.
        bits: 2, 3, 4 or 8.
        group_size: any divisor of rows.

    Returns:
        Packed codes [..., rows, ceil(channels * bits / 32)], scale and minimum [..., rows / group_size, channels].

    Raises:
        ValueError: if bits or group_size do not fit.
    """
    _check(bits, "rows", x.shape[-2], group_size)
    return reference.quantize_keys(x, bits, group_size)


def dequantize_keys(quantized: Quantized, bits: int, group_size: int) -> Float[mx.array, "*batch rows channels"]:
    """Return code * scale + minimum for every key, in the dtype of the scale."""
    return reference.dequantize_keys(quantized, bits, group_size)


def quantize_values(x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int) -> Quantized:
    """Quantise per token: a group is `group_size` consecutive channels of one row.

    Args:
        x: values [..., rows, channels], float32, float16 or bfloat16.
        bits: 2, 3, 4 or 8.
        group_size: any divisor of channels.

    Returns:
        Packed codes [..., rows, ceil(channels * bits / 32)], scale and minimum [..., rows, channels / group_size].

    Raises:
        ValueError: if bits or group_size do not fit.
    """
    _check(bits, "channels", x.shape[-1], group_size)
    return reference.quantize_values(x, bits, group_size)


def dequantize_values(quantized: Quantized, bits: int, group_size: int) -> Float[mx.array, "*batch rows channels"]:
    """Return code * scale + minimum for every value, in the dtype of the scale."""
    return reference.dequantize_values(quantized, bits, group_size)


def _check(bits: int, axis: str, length: int, group_size: int) -> None:
    if bits not in BITS:
        raise ValueError(f"[kivi] expected bits in {BITS}, got {bits}")
    if group_size < 1 or length % group_size:
        raise ValueError(f"[kivi] expected {axis} divisible by group_size {group_size}, got {length}")
