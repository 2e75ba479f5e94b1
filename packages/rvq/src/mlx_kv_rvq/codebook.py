"""Codebooks for the coordinates of a rotated unit vector: Lloyd-Max quantisers of their density, one after the other.

A coordinate t of a random unit vector of d dimensions has a density proportional to (1 - t^2)^((d - 3) / 2); the later
stages' is that of what the stages before leave of t.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import sqrt

Levels = tuple[float, ...]

_POINTS = 1 << 14  # that stand for the density
_REACH = 9.0  # standard deviations: what lies beyond weighs 1e-18


@cache
def codebooks(dim: int, bits: int, stages: int) -> tuple[Levels, ...]:
    """Return the 2**bits levels of each stage, ascending."""
    reach = min(1.0, _REACH / sqrt(dim))
    points = [reach * ((2 * i + 1) / _POINTS - 1) for i in range(_POINTS)]
    weights = [(1 - t * t) ** ((dim - 3) / 2) for t in points]
    books: list[Levels] = []
    for _ in range(stages):
        levels = symmetric(lloyd_max(points, weights, 1 << bits))
        books.append(levels)
        borders = midpoints(levels)
        left = sorted((t - levels[bisect_right(borders, t)], weight) for t, weight in zip(points, weights, strict=True))
        points, weights = [t for t, _ in left], [weight for _, weight in left]
    return tuple(books)


def lloyd_max(points: Sequence[float], weights: Sequence[float], count: int) -> Levels:
    """Return the levels of least squared error for weighted points (ascending): Lloyd's algorithm, from quantiles."""
    mass = [0.0, *accumulate(weights)]
    moment = [0.0, *accumulate(t * weight for t, weight in zip(points, weights, strict=True))]
    starts = [bisect_right(mass, mass[-1] * (2 * i + 1) / (2 * count)) - 1 for i in range(count)]
    levels = [points[min(start, len(points) - 1)] for start in starts]
    while True:
        cells = [0, *(bisect_right(points, border) for border in midpoints(levels)), len(points)]
        means = [
            (moment[b] - moment[a]) / (mass[b] - mass[a]) if mass[b] > mass[a] else level
            for (a, b), level in zip(pairwise(cells), levels, strict=True)
        ]
        if means == levels:  # cells of points: after finitely many turns nothing moves
            return tuple(levels)
        levels = means


def symmetric(levels: Sequence[float]) -> Levels:
    """Return levels of a symmetric density as they are but for rounding: each the negative of its opposite."""
    return tuple((a - b) / 2 for a, b in zip(levels, reversed(levels), strict=True))


def midpoints(levels: Sequence[float]) -> Levels:
    """Return the borders between levels: a number on one belongs to the lower."""
    return tuple((a + b) / 2 for a, b in pairwise(levels))
