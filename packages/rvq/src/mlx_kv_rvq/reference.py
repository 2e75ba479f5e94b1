"""RVQ's encoding in plain MLX: the specification that kernels and store are tested against.

Shapes end in [..., rows, channels]. A row is rotated, its block's mean removed if asked for, and split into its norm
and a unit vector, whose coordinates are quantised by codebooks, one after the other on what is left. Codes are packed
along channels, stage after stage: code j of a stage at bit bits*j of its stream, little-endian in 32-bit words, without
gaps at any width; the last word of a stream is filled up with zeros.

Levels are symmetric, and a code is found by magnitude and sign: of half of them, how many borders lie below.

Sums are written out in the order in which the kernel adds: both then find the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from .codebook import codebooks, midpoints
from .config import BLOCK
from .rotation import rotate_unscaled, turn_back

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float, Float32, UInt32

SMALLEST_SQUARE, LARGEST_SQUARE = 2.0**-100, 2.0**100
_LANES = 4  # of the kernel, which share a row
_ROWS_OF_SIMDGROUP = 8


class Encoded(NamedTuple):
    """Packed codes, a norm for each row and, of centred rows, the rotated mean of each block of 128."""

    codes: UInt32[mx.array, "*batch rows words"]
    norm: BFloat16[mx.array, "*batch rows 1"]
    """bfloat16: two bytes that no norm of finite rows overflows."""
    mean: mx.array | None = None
    """[..., rows / 128, channels] in the dtype of the rows."""


def encode(
    x: Float[mx.array, "*batch rows channels"],
    bits: int,
    stages: int = 1,
    seed: int = 0,
    *,
    unbiased: bool = False,
    center: bool = False,
    skip: Sequence[int] = (),
) -> Encoded:
    """Encode rows; what it means is in `mlx_kv_rvq.encode`.

    Numbers at the limits:

    - A row whose norm (after centring) is below 2^-50 reads back as its block's mean, or as zeros.
    - A row with a NaN or an infinity in it, or with a norm of 2^50 or more, reads back as NaN; if rows are centred, a
      NaN or an infinity does so to its whole block.
    """
    dim = x.shape[-1]
    y, mean = rotate_unscaled(x.astype(mx.float32), seed), None  # by dim^0.5, which is taken out of means and norms
    if center:
        mean = _block_means(y, skip, x.dtype)
        y = y - mx.repeat(mean.astype(mx.float32) * dim**0.5, BLOCK, axis=-2)
    square = _sum(y * y)[..., None]
    usual = (square >= SMALLEST_SQUARE * dim) & (square < LARGEST_SQUARE * dim)
    size = mx.sqrt(mx.where(usual, square, 1))  # of y; codebooks are for rows of size 1
    norm = size * dim**-0.5
    left = y = mx.where(usual, y, 0)
    decoded = mx.zeros_like(y)
    streams: list[mx.array] = []
    half = 1 << bits - 1
    for levels in codebooks(dim, bits, stages):
        above = (mx.abs(left)[..., None] > size[..., None] * mx.array(midpoints(levels)[half:])).sum(axis=-1)
        negative = left.view(mx.uint32) >> 31  # of -0 too
        codes = mx.where(negative, half - 1 - above, half + above)
        centroids = mx.take(mx.array(levels), codes)
        left, decoded = left - centroids * size, decoded + centroids
        streams.append(pack(codes.astype(mx.uint32), bits))
    if unbiased:
        norm = square * dim**-0.5 * (1 / _sum(y * decoded)[..., None])
    norm = mx.where(usual, norm, mx.where(square < SMALLEST_SQUARE * dim, 0, float("nan")))
    return Encoded(mx.concatenate(streams, axis=-1), norm.astype(mx.bfloat16), mean)


def decode(
    encoded: Encoded, bits: int, stages: int, seed: int, channels: int, dtype: mx.Dtype
) -> Float[mx.array, "*batch rows channels"]:
    """Undo `encode` up to its rounding."""
    return turn_back(decode_rotated(encoded, bits, stages, channels), seed).astype(dtype)


def decode_rotated(
    encoded: Encoded, bits: int, stages: int, channels: int
) -> Float32[mx.array, "*batch rows channels"]:
    """Return the rows that `decode` rotates back."""
    codes, norm, mean = encoded
    words = codes.shape[-1] // stages
    total = mx.zeros((*codes.shape[:-1], channels))
    for stage, levels in enumerate(_levels(channels, bits, stages)):
        total = total + mx.take(levels, unpack(codes[..., stage * words : (stage + 1) * words], bits, channels))
    y = total * norm.astype(mx.float32)
    return y if mean is None else y + mx.repeat(mean.astype(mx.float32), BLOCK, axis=-2)


def pack(codes: UInt32[mx.array, "*batch rows channels"], bits: int) -> UInt32[mx.array, "*batch rows words"]:
    """Pack codes below 2**bits into 32-bit words."""
    count, octets = _cycle(bits)
    *batch, channels = codes.shape
    padded = mx.pad(codes, [(0, 0)] * len(batch) + [(0, -channels % 32)])
    cycles = padded.reshape(*batch, padded.shape[-1] // count, count) << _shifts(count, bits)
    packed = mx.sum(cycles, axis=-1, keepdims=True).view(mx.uint8)[..., :octets]
    words = packed.reshape(*batch, padded.shape[-1] * bits // 8).view(mx.uint32)
    return words[..., : words_of(channels, bits)]


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


def words_of(channels: int, bits: int) -> int:
    """Return the 32-bit words of a stage's codes of one row."""
    return -(-channels * bits // 32)


def _cycle(bits: int) -> tuple[int, int]:
    """How many codes fill how many whole bytes of one word."""
    return (8, 3) if bits == 3 else (32 // bits, 4)


def _shifts(count: int, bits: int) -> mx.array:
    return bits * mx.arange(count, dtype=mx.uint32)


def _block_means(y: mx.array, skip: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return the mean of each block of 128 rows, without the first skip[b] rows of sequence b's first block.

    The rows are given times dim^0.5.
    """
    *batch, rows, channels = y.shape
    counts = mx.full((rows // BLOCK, 1), BLOCK, mx.float32)
    if any(skip):
        first = mx.array(list(skip)).reshape(-1, *(1,) * (y.ndim - 1))  # [batch, 1, ..., 1]
        y = mx.where(mx.arange(rows)[:, None] < first, 0, y)
        counts = BLOCK - mx.where(mx.arange(rows // BLOCK)[:, None] == 0, first, 0).astype(mx.float32)
    blocks = y.reshape(*batch, rows // BLOCK, BLOCK // _ROWS_OF_SIMDGROUP, _ROWS_OF_SIMDGROUP, channels)
    total = _fold(_fold(mx.moveaxis(blocks, -2, -1)).swapaxes(-1, -2))
    largest = mx.finfo(dtype).max
    return mx.clip(total * (1 / counts) * channels**-0.5, -largest, largest).astype(dtype)


def _sum(x: mx.array) -> mx.array:
    """Sum the channels: those of each of four lanes first."""
    return _fold(_fold(x.reshape(*x.shape[:-1], _LANES, x.shape[-1] // _LANES)))


def _fold(x: mx.array) -> mx.array:
    """Sum the last axis: halves onto each other as long as there are two, then one by one."""
    n = x.shape[-1]
    while n % 2 == 0:
        n //= 2
        x = x[..., :n] + x[..., n:]
    total = x[..., 0]
    for i in range(1, n):
        total = total + x[..., i]
    return total


@cache
def _levels(channels: int, bits: int, stages: int) -> tuple[mx.array, ...]:
    levels = tuple(mx.array(book) for book in codebooks(channels, bits, stages))
    mx.eval(levels)
    return levels
