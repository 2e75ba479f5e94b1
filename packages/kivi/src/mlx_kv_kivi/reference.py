"""KIVI's quantisation in plain MLX: the specification that kernels and store are tested against.

Shapes end in [..., rows, channels]. Codes are packed along channels: element j of a row at bit bits*j, little-endian in
32-bit words, without gaps at any width; the last word of a row is filled up with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, UInt32


RANGE_LIMIT = 2.0**100  # so that a scale's inverse, and what it lacks, are normal float32 numbers
SMALLEST_SCALE = 2.0**-80
SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16


class Quantized(NamedTuple):
    """Packed codes, and the scale and minimum of each group in the model's dtype: x = code * scale + minimum."""

    codes: UInt32[mx.array, "*batch rows words"]
    scale: mx.array
    minimum: mx.array


def quantize_keys(x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int) -> Quantized:
    """Quantise per channel: a group is `group_size` consecutive rows of one channel (arXiv 2402.02750, section 3.2).

    Returns:
        Codes [..., rows, words], scale and minimum [..., rows / group_size, channels].
    """
    *batch, rows, channels = x.shape
    groups = x.reshape(*batch, rows // group_size, group_size, channels)
    codes, scale, minimum = _quantize(groups, bits, axis=-2)
    return Quantized(pack(codes.reshape(x.shape), bits), scale, minimum)


def dequantize_keys(quantized: Quantized, bits: int, group_size: int) -> Float[mx.array, "*batch rows channels"]:
    """Undo `quantize_keys` up to its rounding."""
    codes, scale, minimum = quantized
    *batch, groups, channels = scale.shape
    codes = unpack(codes, bits, channels).reshape(*batch, groups, group_size, channels)
    return _dequantize(codes, scale[..., None, :], minimum[..., None, :]).reshape(*batch, groups * group_size, channels)


def quantize_values(x: Float[mx.array, "*batch rows channels"], bits: int, group_size: int) -> Quantized:
    """Quantise per token: a group is `group_size` consecutive channels of one row (arXiv 2402.02750, section 3.2).

    Returns:
        Codes [..., rows, words], scale and minimum [..., rows, channels / group_size].
    """
    *batch, rows, channels = x.shape
    groups = x.reshape(*batch, rows, channels // group_size, group_size)
    codes, scale, minimum = _quantize(groups, bits, axis=-1)
    return Quantized(pack(codes.reshape(x.shape), bits), scale, minimum)


def dequantize_values(quantized: Quantized, bits: int, group_size: int) -> Float[mx.array, "*batch rows channels"]:
    """Undo `quantize_values` up to its rounding."""
    codes, scale, minimum = quantized
    *batch, rows, groups = scale.shape
    codes = unpack(codes, bits, groups * group_size).reshape(*batch, rows, groups, group_size)
    return _dequantize(codes, scale[..., None], minimum[..., None]).reshape(*batch, rows, groups * group_size)


def pack(codes: UInt32[mx.array, "*batch rows channels"], bits: int) -> UInt32[mx.array, "*batch rows words"]:
    """Pack codes below 2**bits into 32-bit words."""
    count, octets = _cycle(bits)
    *batch, channels = codes.shape
    padded = mx.pad(codes.astype(mx.uint32), [(0, 0)] * len(batch) + [(0, -channels % 32)])
    cycles = padded.reshape(*batch, padded.shape[-1] // count, count) << _shifts(count, bits)
    packed = mx.sum(cycles, axis=-1, keepdims=True).view(mx.uint8)[..., :octets]
    words = packed.reshape(*batch, padded.shape[-1] * bits // 8).view(mx.uint32)
    return words[..., : -(-channels * bits // 32)]


def unpack(
    words: UInt32[mx.array, "*batch rows words"], bits: int, channels: int
) -> UInt32[mx.array, "*batch rows channels"]:
    """Undo `pack`: the first `channels` codes of each row."""
    count, octets = _cycle(bits)
    *batch, held = words.shape
    padded = mx.pad(words, [(0, 0)] * len(batch) + [(0, -held % octets)])
    packed = padded.view(mx.uint8).reshape(*batch, padded.shape[-1] * 4 // octets, octets)
    cycles = mx.pad(packed, [(0, 0)] * (len(batch) + 1) + [(0, 4 - octets)]).view(mx.uint32)
    codes = cycles >> _shifts(count, bits) & ((1 << bits) - 1)
    return codes.reshape(*batch, padded.shape[-1] * 32 // bits)[..., :channels]


def _cycle(bits: int) -> tuple[int, int]:
    """How many codes fill how many whole bytes of one word."""
    return (8, 3) if bits == 3 else (32 // bits, 4)


def _shifts(count: int, bits: int) -> mx.array:
    return bits * mx.arange(count, dtype=mx.uint32)


def _quantize(groups: mx.array, bits: int, axis: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return codes (unpacked), scale and minimum of groups that lie along `axis`.

    Extremes and scale are computed in float32: in fp16 the range of +-6e4 would be inf. The codes come from the scale
    and minimum as stored. Numbers that leave the range of a dtype:

    - A group with a NaN or an infinity in it, or with a range of 2**100 or more, reads back as NaN throughout.
    - A group whose stored scale is below 2**-80, or zero in fp16, counts as constant: scale 1, codes 0.
    - A minimum below float32's normal numbers is stored as 0. With the rule before, this makes scale, minimum and codes
      the same on GPUs that flush such numbers to zero.
    """
    x = groups.astype(mx.float32)
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    span = high - low
    finite = mx.isfinite(x).all(axis=axis, keepdims=True) & (span < RANGE_LIMIT)
    scale = (span / (2**bits - 1)).astype(groups.dtype)
    scale = mx.where(finite & (scale.astype(mx.float32) >= SMALLEST_SCALE), scale, mx.array(1, groups.dtype))
    minimum = mx.where(mx.abs(low) < SMALLEST_NORMAL, 0, low)
    minimum = mx.where(finite, minimum, float("nan")).astype(groups.dtype)
    codes = mx.round(mx.clip((x - minimum.astype(mx.float32)) / scale.astype(mx.float32), 0, 2**bits - 1))
    codes = mx.where(finite, codes, 0).astype(mx.uint32)
    return codes, scale.squeeze(axis), minimum.squeeze(axis)


def _dequantize(codes: mx.array, scale: mx.array, minimum: mx.array) -> mx.array:
    return (codes.astype(mx.float32) * scale.astype(mx.float32) + minimum.astype(mx.float32)).astype(scale.dtype)
