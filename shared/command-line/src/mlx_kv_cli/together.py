"""Several caches in one forward pass: to the model a batch, of which each sequence has a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_kv import CompressedKVCache
from mlx_kv.seam import SeamCache

if TYPE_CHECKING:
    from mlx_kv_cli.lm import Cache


class Together(SeamCache):
    """One layer's caches, which have all seen the same number of tokens.

    Given a batch with a sequence for each cache, every sequence attends through its own. Given a single sequence, all
    caches take it, and what comes back is the first one's attention.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        """Make a layer of caches of one sequence each."""
        self.caches = caches
        self._rows: list[Any] = []

    @property
    def offset(self) -> int:
        """Tokens seen."""
        return self.caches[0].offset

    @property
    def state(self) -> list[Any]:
        """All caches' arrays, for whoever evaluates them."""
        return [cache.state for cache in self.caches]

    def make_mask(self, *args: Any, **options: Any) -> mx.array | str | None:
        """Return the mask for the next tokens, the same for every cache."""
        return self.caches[0].make_mask(*args, **options)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append to every cache; what is returned is for `attend` alone."""
        self._rows = [
            cache.update_and_fetch(_sequence(keys, i), _sequence(values, i)) for i, cache in enumerate(self.caches)
        ]
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend in every cache."""
        outputs: list[mx.array] = []
        for i, (cache, (own_keys, own_values)) in enumerate(zip(self.caches, self._rows, strict=True)):
            own = _sequence(queries, i), own_keys, own_values, cache
            outputs.append(base.scaled_dot_product_attention(*own, scale=scale, mask=mask, sinks=sinks))
        return mx.concatenate(outputs) if queries.shape[0] > 1 else outputs[0]


def together(caches: Sequence[Cache]) -> Cache:
    """Return one cache of all these."""
    return [Together(layer) for layer in zip(*caches, strict=True)]


def can_go_together(caches: Sequence[Cache]) -> bool:
    """Tell whether `together` would change nothing but the time it takes.

    In every layer one of the caches must be compressed, so mlx_kv has found that attention there is its cache's affair,
    and the others must be of kinds that hold all tokens.
    """
    kinds = CompressedKVCache, KVCache, QuantizedKVCache
    return all(
        any(isinstance(cache, CompressedKVCache) for cache in layer)
        and all(isinstance(cache, kinds) for cache in layer)
        for layer in zip(*caches, strict=True)
    )


def starts_exactly(cache: Cache) -> bool:
    """Tell whether the first tokens given to an empty cache attend to each other as they are.

    What is not known to do so, such as mlx-lm's quantised cache, does not.
    """
    return all(isinstance(layer, CompressedKVCache) or type(layer) is KVCache for layer in cache)


def _sequence(batch: mx.array, number: int) -> mx.array:
    return batch[number : number + 1] if batch.shape[0] > 1 else batch
