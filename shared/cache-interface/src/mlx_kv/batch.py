"""The half of the cache protocol that mlx-lm's batches use."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from .policy import Policy
from .rows import Span
from .store import Store

if TYPE_CHECKING:
    import mlx.core as mx


class BatchProtocol:
    """Merging, splitting and padding, on one ragged store.

    Towards mlx-lm a batch is left padded to one width, so that the masks it shares with uncompressed layers fit; the
    numbers below follow BatchKVCache's. The store never sees padding.
    """

    policy: Policy
    store: Store
    origin: dict[str, Any]

    def __init__(self) -> None:
        """Start as a cache that is not a batch of mlx-lm's making."""
        self._width: int = 0  # tokens seen, padding included
        self._left: list[int] | None = None  # left padding of each sequence; None: not such a batch
        self._right: list[int] | None = None  # right padding of the prompt that is being processed
        self._due: list[int] | None = None  # its tokens that are still to come

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """Make one batch of caches that each hold one sequence; some may be empty.

        Raises:
            ValueError: if they are of different methods or layers.
        """
        first = caches[0]
        first._check_same(caches)
        for cache in caches:
            cache.store.settle()
        batch = first._around(first.policy.fresh(), first.store.fresh())
        for cache in caches:
            started = bool(cache.store.lengths)
            batch.policy.extend(cache.policy if started else cache.policy.blank(1))
            batch.store.extend(cache.store if started else cache.store.blank(1))
        batch._width = max(cache._width for cache in caches)
        batch._left = [batch._width - cache._width for cache in caches]
        return batch

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say how the next prompt is padded: on the left (an empty batch only) or, with `lengths`, on the right."""
        if left_padding is not None:
            if self._width:
                raise ValueError("[mlx_kv] left padding can only be added to an empty batch")
            present = self._left or [0] * len(left_padding)
            self._left = [old + new for old, new in zip(present, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[mlx_kv] expected lengths with right_padding")
            self._left = self._left or [0] * len(right_padding)
            self._right, self._due = list(right_padding), list(lengths)

    def finalize(self) -> None:
        """End a right-padded prompt: from now on its padding counts as left padding."""
        if self._right is not None and self._left is not None:
            self._left = [left + right for left, right in zip(self._left, self._right, strict=True)]
        self._right = self._due = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences of the batch, in this order."""
        kept = _integers(batch_indices)
        self.store.settle()
        self.policy, self.store = self.policy.select(kept), self.store.select(kept)
        if self._left is not None:
            left = [self._left[b] for b in kept]
            spare = min(left, default=0)
            self._width -= spare
            self._left = [n - spare for n in left]
        self._right = None if self._right is None else [self._right[b] for b in kept]
        self._due = None if self._due is None else [self._due[b] for b in kept]

    def extend(self, other: Self) -> None:
        """Append another batch's sequences.

        Raises:
            ValueError: if it is of another method or layer.
        """
        self._check_same([other])
        self.store.settle()
        other.store.settle()
        self.policy.extend(other.policy)
        self.store.extend(other.store)
        width = max(self._width, other._width)
        self._left = self._padded_to(width) + other._padded_to(width)
        self._width = width

    def extract(self, index: int) -> Self:
        """Return a cache of its own for one sequence of the batch."""
        self.store.settle()
        single = self._around(self.policy.select([index]), self.store.select([index]))
        single._width = self._width - (self._left[index] if self._left is not None else 0)
        return single

    def _check_same(self, others: Sequence[Self]) -> None:
        if any(other.origin != self.origin for other in others):
            raise ValueError("[mlx_kv] expected caches of one model, method and layer in a batch, got different ones")

    def _real(self, batch: int, chunk: int) -> list[Span]:
        """Return the span of real tokens of the next chunk in each sequence."""
        if self._left is None:
            return [(0, chunk)] * batch
        first = [min(max(left - self._width, 0), chunk) for left in self._left]
        due = [chunk] * batch if self._due is None else self._due
        return [(f, min(f + d, chunk)) for f, d in zip(first, due, strict=True)]

    def _advance(self, chunk: int, spans: Sequence[Span]) -> None:
        self._width += chunk
        if self._due is not None:
            self._due = [due - (last - first) for due, (first, last) in zip(self._due, spans, strict=True)]

    def _padded_to(self, width: int) -> list[int]:
        left = self._left if self._left is not None else [0] * len(self.store.lengths)
        return [n + width - self._width for n in left]

    def _around(self, policy: Policy, store: Store) -> Self:
        """Return a cache for the same layer around another policy and store, with the layout of an empty one."""
        twin = copy(self)
        twin.policy, twin.store = policy, store
        BatchProtocol.__init__(twin)
        return twin


def _integers(indices: Sequence[int] | mx.array) -> list[int]:
    return [int(i) for i in (indices if isinstance(indices, Sequence) else indices.tolist())]  # type: ignore[union-attr]
