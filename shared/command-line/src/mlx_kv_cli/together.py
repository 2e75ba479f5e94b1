"""Several caches in one forward pass: to the model a batch, of which each sequence has a cache of its own.

What is compared goes through the model together where it can, which reads the weights once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_kv import CompressedKVCache
from mlx_kv.seam import SeamCache
from mlx_kv_cli import lm

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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


class Lockstep:
    """Caches that are filled side by side, each as it would be alone."""

    def __init__(self, model: lm.Model, caches: Sequence[lm.Cache]) -> None:
        """Take empty caches."""
        self.model, self.caches = model, caches
        self._joint = together(caches) if can_go_together(caches) else None

    def feed(self, tokens: Int[mx.array, "1 tokens"]) -> None:
        """Give all caches the same tokens."""
        alone = self.caches
        if self._joint is not None and self._joint[0].offset == 0:
            # Where nothing has been compressed yet, one computation serves them all.
            lm.feed(self.model, tokens, together([cache for cache in alone if starts_exactly(cache)]))
            alone = [cache for cache in alone if not starts_exactly(cache)]
        for cache in alone:
            lm.feed(self.model, tokens, cache)

    def logits(self, tokens: Int[mx.array, "caches tokens"]) -> Iterator[Float[mx.array, "tokens vocabulary"]]:
        """Give each cache tokens of its own, and yield its logits."""
        if self._joint is None:
            for i, cache in enumerate(self.caches):
                yield lm.logits(self.model, tokens[i : i + 1], cache)[0]
        else:
            yield from lm.logits(self.model, tokens, self._joint)


def together(caches: Sequence[lm.Cache]) -> lm.Cache:
    """Return one cache of all these."""
    return [Together(layer) for layer in zip(*caches, strict=True)]


def can_go_together(caches: Sequence[lm.Cache]) -> bool:
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


def starts_exactly(cache: lm.Cache) -> bool:
    """Tell whether the first tokens given to an empty cache attend to each other as they are.

    What is not known to do so, such as mlx-lm's quantised cache, does not.
    """
    return all(isinstance(layer, CompressedKVCache) or type(layer) is KVCache for layer in cache)


def _sequence(batch: mx.array, number: int) -> mx.array:
    return batch[number : number + 1] if batch.shape[0] > 1 else batch
