"""The public functions encode and decode, and what a store needs of one side's encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from . import launch, reference
from .config import BITS, BLOCK, STAGES
from .reference import Encoded
from .rotation import HEAD_DIMS

if TYPE_CHECKING:
    from jaxtyping import Float


class Codec(Protocol):
    """How a store encodes the rows of one side."""

    @property
    def centered(self) -> bool:
        """Whether rows are encoded by whole blocks of 128, less their mean."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that belong to this side alone."""
        ...

    def encode(self, x: Float[mx.array, "batch heads rows dim"], skip: Sequence[int]) -> Encoded:
        """Encode rows; the first skip[b] rows of sequence b are left out of their block's mean."""
        ...

    def decode(self, encoded: Encoded, dim: int, dtype: mx.Dtype) -> Float[mx.array, "batch heads rows dim"]:
        """Undo `encode` up to its rounding."""
        ...


@dataclass(frozen=True)
class RotatedCodec:
    """Rotation and codebooks made for it; the options are those of `encode`."""

    bits: int
    stages: int
    seed: int
    unbiased: bool
    centered: bool
    nbytes: int = 0

    def encode(self, x: mx.array, skip: Sequence[int]) -> Encoded:
        """Encode rows."""
        return encode(x, self.bits, self.stages, self.seed, unbiased=self.unbiased, center=self.centered, skip=skip)

    def decode(self, encoded: Encoded, dim: int, dtype: mx.Dtype) -> mx.array:
        """Undo `encode`."""
        return decode(encoded, self.bits, self.stages, self.seed, channels=dim, dtype=dtype)


def encode(
    x: Float[mx.array, "*batch rows channels"],
    bits: int,
    stages: int = 1,
    seed: int = 0,
    *,
    unbiased: bool = False,
    center: bool = False,
    skip: Sequence[int] = (),
    backend: str | None = None,
) -> Encoded:
    """Rotate rows and quantise each one's direction by codebooks for the coordinates of a random unit vector.

    Args:
        x: rows [..., rows, channels], float32, float16 or bfloat16; channels 64, 80, 96, 112, 128, 192 or 256.
        bits: of a code in each stage, 1 to 4.
        stages: 1 to 3; each codes what the stages before leave.
        seed: of the rotation's signs.
        unbiased: store norm / <u, u'> instead of the norm, where the unit vector u decodes to u': inner products are
            then right on average. With the norm they shrink by 0.64, 0.88, 0.97 and 0.99 (1 to 4 bits), but the
            squared error is the least.
        center: remove the mean of each block of 128 rows first, and keep it. The rows must be whole blocks.
        skip: for each entry of the first axis, the rows of its first block, below 128, that are left out of its mean.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto). "auto" takes
            the reference for what no kernel takes, and says so once through logging.

    Returns:
        Codes [..., rows, stages * ceil(channels * bits / 32)], norms [..., rows, 1] in bfloat16 and, with `center`, the
        means, rotated, [..., rows / 128, channels] in the dtype of x.

    Raises:
        ValueError: if an argument is out of its range, or there is no rotation for so many channels.
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for this array.
    """
    _check(bits, stages, x.shape[-1])
    if center and x.shape[-2] % BLOCK:
        raise ValueError(f"[rvq] expected whole blocks of {BLOCK} rows to center, got {x.shape[-2]} rows")
    if skip and (x.ndim < 3 or len(skip) != x.shape[0] or not all(0 <= n < BLOCK for n in skip)):
        raise ValueError(f"[rvq] expected skip from 0 to {BLOCK - 1} for each of the first axis, got {list(skip)}")
    chosen = launch.choose(backend, x.dtype)
    if chosen == "reference" or not x.size:
        return reference.encode(x, bits, stages, seed, unbiased=unbiased, center=center, skip=skip)
    return launch.encode(x, bits, stages, seed, unbiased, center, skip, chosen)


def decode(
    encoded: Encoded,
    bits: int,
    stages: int = 1,
    seed: int = 0,
    *,
    channels: int,
    dtype: mx.Dtype,
    backend: str | None = None,
) -> Float[mx.array, "*batch rows channels"]:
    """Undo `encode` up to its rounding.

    Args:
        encoded: what `encode` returned, or views of it.
        bits: as given to `encode`.
        stages: as given to `encode`.
        seed: as given to `encode`.
        channels: of a row.
        dtype: of the rows to return.
        backend: as for `encode`.

    Raises:
        ValueError: if an argument is out of its range, or the codes are not those of so many channels.
        UnavailableBackendError: if the backend asked for cannot run here, or has no kernel for these arrays.
    """
    _check(bits, stages, channels)
    words = stages * reference.words_of(channels, bits)
    if encoded.codes.shape[-1] != words:
        raise ValueError(f"[rvq] expected {words} words of codes a row, got {encoded.codes.shape[-1]}")
    chosen = launch.choose(backend, dtype)
    if not encoded.codes.size:  # MLX's transform wants rows
        return mx.zeros((*encoded.codes.shape[:-1], channels), dtype)
    if chosen == "reference":
        return reference.decode(encoded, bits, stages, seed, channels, dtype)
    return launch.decode(encoded, bits, stages, seed, channels, dtype, chosen)


def _check(bits: int, stages: int, channels: int) -> None:
    for name, value, allowed in (("bits", bits, BITS), ("stages", stages, STAGES), ("head_dim", channels, HEAD_DIMS)):
        if value not in allowed:
            raise ValueError(f"[rvq] expected {name} in {allowed}, got {value}")
