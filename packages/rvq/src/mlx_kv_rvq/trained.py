"""Residual vector quantisation with trained codebooks (arXiv 2410.15704, section 3), in plain MLX.

A row is divided by its standard deviation and cut into groups of channels: strided ones for keys, so that both halves
of a RoPE pair fall into one group, contiguous ones for values. Each stage takes, for each group, the nearest vector of
its codebook to what the stages before leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .reference import Encoded

if TYPE_CHECKING:
    from jaxtyping import Float, UInt32

STAGES, ENTRIES, GROUP = 8, 256, 32


@dataclass(frozen=True, eq=False)
class TrainedCodec:
    """One side of one layer."""

    books: Float[mx.array, "stages entries group"]
    dim: int
    strided: bool
    centered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the codebooks."""
        return self.books.nbytes

    def encode(self, x: mx.array, skip: Sequence[int]) -> Encoded:
        """Encode rows [..., rows, dim]: a byte for each stage and group, four in a word, and the deviation."""
        sigma = deviation(x)
        codes = nearest(grouped(x.astype(mx.float32) / sigma, self.books.shape[2], self.strided), self.books)
        words = codes.astype(mx.uint8).reshape(*x.shape[:-1], -1).view(mx.uint32)
        return Encoded(words, sigma.astype(mx.bfloat16))

    def decode(self, encoded: Encoded, dim: int, dtype: mx.Dtype) -> mx.array:
        """Undo `encode` up to its rounding."""
        stages, _, group = self.books.shape
        codes = encoded.codes.view(mx.uint8).reshape(*encoded.codes.shape[:-1], stages, dim // group)
        vectors = sum((mx.take(self.books[s], codes[..., s, :], axis=0) for s in range(1, stages)), self._first(codes))
        return (ungrouped(vectors, self.strided) * encoded.norm.astype(mx.float32)).astype(dtype)

    def _first(self, codes: mx.array) -> mx.array:
        return mx.take(self.books[0], codes[..., 0, :], axis=0).astype(mx.float32)


def deviation(x: Float[mx.array, "*batch dim"]) -> Float[mx.array, "*batch 1"]:
    """Return the unbiased standard deviation of each row, without removing its mean from anything; 0 counts as 1."""
    sigma = mx.std(x.astype(mx.float32), axis=-1, keepdims=True, ddof=1)
    return mx.where(sigma == 0, 1, sigma)


def grouped(x: Float[mx.array, "*batch dim"], group: int, strided: bool) -> Float[mx.array, "*batch groups group"]:
    """Cut channels into groups: {i, i + dim / group, ...} if strided, else neighbours."""
    shape = x.shape[:-1]
    return x.reshape(*shape, group, -1).swapaxes(-1, -2) if strided else x.reshape(*shape, -1, group)


def ungrouped(groups: Float[mx.array, "*batch groups group"], strided: bool) -> Float[mx.array, "*batch dim"]:
    """Undo `grouped`."""
    groups = groups.swapaxes(-1, -2) if strided else groups
    return groups.reshape(*groups.shape[:-2], -1)


def nearest(
    vectors: Float[mx.array, "*batch groups group"], books: Float[mx.array, "stages entries group"]
) -> UInt32[mx.array, "*batch stages groups"]:
    """Return each stage's nearest entry to what the stages before leave; ties go to the lowest index."""
    left, codes = vectors, list[mx.array]()
    for book in books.astype(mx.float32):
        codes.append(closest(left, book))
        left = left - mx.take(book, codes[-1], axis=0)
    return mx.stack(codes, axis=-2)


def closest(vectors: Float[mx.array, "*batch group"], book: Float[mx.array, "entries group"]) -> mx.array:
    """Return the index of the nearest entry.

    Summed channel by channel: a matrix product would round differently for another number of rows, and the same row
    would end in other codes.
    """
    distance = (book * book).sum(axis=-1)
    for channel in range(book.shape[1]):
        distance = distance - 2 * vectors[..., channel : channel + 1] * book[:, channel]
    return mx.argmin(distance, axis=-1)
