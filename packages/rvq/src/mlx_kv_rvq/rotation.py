"""The randomised Hadamard rotation: seeded signs, then the transform, orthonormal (QuaRot, arXiv 2404.00456).

A head dim is m * 2^k with m of 1, 12, 20 or 28. Channel b * 2^k + a belongs to row b of the m x m matrix and row a of
the power of two's, as in mx.hadamard_transform.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import TYPE_CHECKING, cast

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Float, Float32

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
"""Those for which MLX's transform is exact; for others it may return garbage without an error."""
_ODD_PARTS = {80: 20, 96: 12, 112: 28, 192: 12}


def odd_part(dim: int) -> int:
    """Return m of a head dim m * 2^k."""
    return _ODD_PARTS.get(dim, 1)


@cache
def negative(dim: int, seed: int) -> tuple[bool, ...]:
    """Return which channels change sign before the transform."""
    bits = Random(seed).getrandbits(dim)
    return tuple(bool(bits >> i & 1) for i in range(dim))


@cache
def negative_columns(dim: int) -> tuple[int, ...]:
    """Return the rows of the m x m matrix, as integers whose bit b says that column b is -1."""
    if odd_part(dim) == 1:
        return (0,)
    # The transform of the unit vector b is column b.
    transform = mx.hadamard_transform(mx.eye(odd_part(dim)), scale=1.0, stream=mx.cpu)
    columns = cast("list[list[float]]", transform.tolist())
    return tuple(sum((column[row] < 0) << b for b, column in enumerate(columns)) for row in range(odd_part(dim)))


def rotate_unscaled(x: Float32[mx.array, "*batch dim"], seed: int) -> Float32[mx.array, "*batch dim"]:
    """Rotate rows, and make them dim^0.5 times as long.

    Sums are in the order in which the kernel adds, so that both find the same codes.
    """
    dim = x.shape[-1]
    m = odd_part(dim)
    y = (x * _signs(dim, seed, x.dtype)).reshape(*x.shape[:-1], m, dim // m)
    half = 1
    while half < dim // m:
        pairs = y.reshape(*x.shape[:-1], m, dim // m // half // 2, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = mx.stack([low + high, low - high], axis=-2).reshape(*x.shape[:-1], m, dim // m)
        half *= 2
    if m > 1:
        matrix = _matrix(dim)
        total = matrix[:, :1] * y[..., :1, :]
        for b in range(1, m):
            total = total + matrix[:, b : b + 1] * y[..., b : b + 1, :]
        y = total
    return y.reshape(x.shape)


def turn_back(y: Float[mx.array, "*batch dim"], seed: int) -> Float[mx.array, "*batch dim"]:
    """Undo dim^-0.5 times `rotate_unscaled`: the transposed transform, by MLX's own, then the signs."""
    dim = y.shape[-1]
    if odd_part(dim) in (20, 28):  # not symmetric: the power of two by MLX's transform, the rest by the transpose
        m = odd_part(dim)
        parts = mx.hadamard_transform(y.reshape(*y.shape[:-1], m, dim // m))
        x = ((_matrix(dim).T * m**-0.5).astype(y.dtype) @ parts).reshape(y.shape)
    else:
        x = mx.hadamard_transform(y)
    return x * _signs(dim, seed, y.dtype)


@cache
def _signs(dim: int, seed: int, dtype: mx.Dtype) -> mx.array:
    signs = mx.array([-1.0 if minus else 1.0 for minus in negative(dim, seed)]).astype(dtype)
    mx.eval(signs)
    return signs


@cache
def _matrix(dim: int) -> mx.array:
    rows = negative_columns(dim)
    matrix = mx.array([[-1.0 if row >> b & 1 else 1.0 for b in range(len(rows))] for row in rows])
    mx.eval(matrix)
    return matrix
