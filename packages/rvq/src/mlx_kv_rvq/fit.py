"""Codebooks fitted to rows: k-means as a start, then exponential moving averages (arXiv 2410.15704, section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from .trained import ENTRIES, GROUP, STAGES, deviation, grouped

if TYPE_CHECKING:
    from jaxtyping import Float, Int

DECAY, EPSILON = 0.99, 1e-5
_BATCH, _KMEANS_TURNS, _PASSES = 4096, 8, 4


class Averages(NamedTuple):
    """Of each entry of a codebook, how many vectors were its own, and their sum, both as moving averages."""

    counts: Float[mx.array, " entries"]
    total: Float[mx.array, "entries group"]

    def codebook(self) -> Float[mx.array, "entries group"]:
        """Return the entries, with counts smoothed as Laplace does, so that none is zero."""
        everything = self.counts.sum()
        smoothed = (self.counts + EPSILON) / (everything + self.counts.size * EPSILON) * everything
        return self.total / smoothed[:, None]


def update(
    averages: Averages,
    vectors: Float[mx.array, "vectors group"],
    owners: Int[mx.array, " vectors"],
    decay: float = DECAY,
) -> Averages:
    """Move the averages towards vectors that have just been assigned to entries."""
    own = _sums(vectors, owners, averages.counts.size)
    return Averages(*(decay * old + (1 - decay) * new for old, new in zip(averages, own, strict=True)))


def fit_codebooks(
    rows: Float[mx.array, "*batch dim"],
    strided: bool,
    seed: int = 0,
    *,
    stages: int = STAGES,
    entries: int = ENTRIES,
    group: int = GROUP,
) -> Float[mx.array, "stages entries group"]:
    """Fit one stage after the other, each to what those before leave of the rows; in float16, as files hold them.

    Raises:
        ValueError: if the dim is no multiple of `group`, or there are fewer vectors than entries.
    """
    if rows.shape[-1] % group:
        raise ValueError(f"[trained_rvq] expected head_dim divisible by {group}, got {rows.shape[-1]}")
    x = rows.astype(mx.float32).reshape(-1, rows.shape[-1])
    left = grouped(x / deviation(x), group, strided).reshape(-1, group)
    if left.shape[0] < entries:
        raise ValueError(f"[trained_rvq] expected at least {entries} vectors to fit to, got {left.shape[0]}")
    books: list[mx.array] = []
    for key in mx.random.split(mx.random.key(seed), stages):
        order = mx.random.permutation(left.shape[0], key=key)
        book = _fit_stage(left[order], left[order[:entries]])
        mx.eval(book)
        books.append(book)
        left = left - mx.take(book.astype(mx.float32), _owners(left, book.astype(mx.float32)), axis=0)
    return mx.stack(books)


def _fit_stage(vectors: mx.array, book: mx.array) -> mx.array:
    averages = Averages(mx.ones(book.shape[0]), book)
    for _ in range(_KMEANS_TURNS):
        own = Averages(*_sums(vectors, _owners(vectors, book), book.shape[0]))
        some = own.counts[:, None] > 0
        book = mx.where(some, own.total / mx.maximum(own.counts, 1)[:, None], book)  # an entry without vectors stays
        averages = Averages(mx.maximum(own.counts, 1), mx.where(some, own.total, book))
        mx.eval(book)
    share = _BATCH / vectors.shape[0]  # what a batch's counts are, beside those of all vectors
    averages = Averages(averages.counts * share, averages.total * share)
    for _ in range(_PASSES):
        for begin in range(0, vectors.shape[0], _BATCH):
            batch = vectors[begin : begin + _BATCH]
            averages = update(averages, batch, _owners(batch, averages.codebook()))
            mx.eval(averages)
    return averages.codebook().astype(mx.float16)


def _owners(vectors: mx.array, book: mx.array) -> mx.array:
    return mx.argmin((book * book).sum(axis=-1) - 2 * (vectors @ book.T), axis=-1)


def _sums(vectors: mx.array, owners: mx.array, entries: int) -> tuple[mx.array, mx.array]:
    one_hot = (owners[:, None] == mx.arange(entries)).astype(mx.float32)
    return one_hot.sum(axis=0), one_hot.T @ vectors
