"""One layer's compressed cache, as mlx-lm sees it."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, Self, cast

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from . import attention
from .batch import BatchProtocol
from .policy import Attended, Policy
from .rows import ONE_TOKEN, Span
from .seam import SeamCache
from .spec import Spec
from .store import Geometry, Store

if TYPE_CHECKING:
    from jaxtyping import Float

Offset = int | mx.array


class CompressedKVCache(BatchProtocol, SeamCache):
    """A policy over a store, speaking the whole cache protocol of mlx-lm.

    The cache follows two layouts at once. Towards the model it is what an uncompressed cache would be: `offset` counts
    tokens seen, masks cover all of them, and a batch is left padded to one width. Inside, the store holds the rows that
    are kept, each sequence from its own first row on. Only `attend` brings the two together.
    """

    def __init__(self, policy: Policy, store: Store, origin: dict[str, Any] | None = None) -> None:
        """Make an empty cache.

        Args:
            policy: which rows are kept.
            store: how they are held.
            origin: where the cache comes from, for saving and loading: "model" (fingerprint), "spec" and "geometry".
        """
        super().__init__()
        store.accept(policy)
        self.policy = policy
        self.store = store
        self.origin = origin or {}
        self._numbers = 0  # of one token's keys and values, all heads together
        self._spans: list[Span] = []
        self._returned: tuple[mx.array, mx.array] | None = None

    # What the model calls.

    @property
    def offset(self) -> Offset:
        """Tokens seen, an array [batch] in a batch: the position of the next token."""
        if self._left is None:
            return self._width
        return mx.array([self._width - left for left in self._left])

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask that an uncompressed cache would make for the next `n` tokens."""
        if self._left is not None:
            return create_causal_mask(n, self._width, window_size=window_size, left_padding=mx.array(self._left))
        if n == 1 and window_size is None:
            return None
        if return_array or window_size is not None:
            return create_causal_mask(n, self._width, window_size=window_size)
        return "causal"

    def update_and_fetch(
        self,
        keys: Float[mx.array, "batch kv_heads chunk key_dim"],
        values: Float[mx.array, "batch kv_heads chunk value_dim"],
    ) -> tuple[mx.array, mx.array]:
        """Append a chunk; what is returned has an uncompressed cache's shape but no values, for `attend` alone."""
        shape, of_values = keys.shape, values.shape
        batch, heads, chunk, width = shape
        present = len(self.store.lengths) or batch
        if shape[:3] != of_values[:3] or batch != present:
            raise ValueError(
                f"[mlx_kv] expected keys and values of {present} sequences, with as many heads and rows each, got "
                f"{list(shape)} and {list(of_values)}"
            )
        self._spans = self._real(batch, chunk)
        self.store.append(keys, values, self._spans)
        self._advance(chunk, self._spans)
        self._numbers = heads * (width + of_values[3])
        # NaN, so that a model that looked inside would show it at once; never computed otherwise.
        nan, like_cached = _nan(keys.dtype), (batch, heads, self._width)
        of_keys = mx.broadcast_to(nan, (*like_cached, width))
        self._returned = of_keys, of_keys if shape == of_values else mx.broadcast_to(nan, (*like_cached, of_values[3]))
        return self._returned

    def attend(
        self,
        queries: Float[mx.array, "batch query_heads chunk key_dim"],
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: attention.Mask,
        sinks: mx.array | None = None,
    ) -> Float[mx.array, "batch query_heads chunk value_dim"]:
        """Answer mlx-lm's scaled_dot_product_attention for this layer.

        Raises:
            ValueError: if keys and values are not the objects that update_and_fetch has just returned, or if an
                additive mask meets rows that are not the tokens seen.
        """
        if self._returned is None or keys is not self._returned[0] or values is not self._returned[1]:
            raise ValueError(
                "[mlx_kv] attention was given other keys or values than update_and_fetch returned for this layer"
            )
        self._returned = None
        chunk = queries.shape[2]
        decodes = chunk == 1 and self._sees_all(mask)
        if decodes and self._spans == ONE_TOKEN:
            answered = self.policy.decode(queries, self.store, scale, sinks)
            if answered is not None:
                return answered
        wanted = self.policy.needs_logits and chunk == 1
        decoded = attention.decode(self.store, queries, scale, sinks, wanted) if decodes else None
        if decoded is not None:
            output, logits = decoded
        else:
            rows_mask = self._rows_mask(mask, chunk)
            output = attention.attend(self.store, queries, scale, rows_mask, sinks)
            logits = attention.logits(self.store, queries, scale, rows_mask) if wanted else None
        changed = self.policy.observe(Attended(queries, self._spans, scale, sinks, self.store, logits))
        if chunk > 1:
            # A single token's turn is compressed at the next one, where nothing that is still reading the buffers is
            # written to.
            self.store.settle()
        if chunk > 1 or changed:
            held = [*self.store.held(), *self.policy.arrays().values()]
            output = cast("mx.array", mx.depends(output, held))
        return output

    # What mlx-lm asks.

    @property
    def keys(self) -> mx.array | None:
        """An array of the cache, for callers that tie its evaluation to something else by setting it."""
        return next(iter(self.store.arrays().values()), None)

    @keys.setter
    def keys(self, array: mx.array) -> None:
        buffer = next(buffer for buffer in self.store.buffers().values() if buffer.data is not None)
        buffer.data = array

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the rows held, uncompressed: [batch, kv_heads, rows, dim]."""
        self.store.settle()
        return self.store.dense()

    def size(self) -> int:
        """Tokens seen, padding included."""
        return self._width

    def empty(self) -> bool:
        """Tell whether nothing has been appended yet."""
        return self._width == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        self.store.settle()
        return self.store.nbytes + sum(array.nbytes for array in self.policy.arrays().values())

    @property
    def fp16_bytes(self) -> int:
        """Bytes that the keys and values of the tokens seen take at two bytes a number."""
        seen = self._width * max(len(self.store.lengths), 1) - sum(self._left or [])
        return 2 * self._numbers * seen

    @property
    def method(self) -> str:
        """The spec this cache was made from."""
        return self.origin.get("spec", f"{type(self.policy).__name__}+{type(self.store).__name__}")

    @property
    def state(self) -> tuple[dict[str, dict[str, mx.array]], str]:
        """All arrays, and a JSON text with everything else."""
        self.store.settle()
        rest = {
            "origin": self.origin,
            "store": self.store.places(),
            "policy": self.policy.places(),
            "layout": [self._width, self._left, self._right, self._due, self._numbers],
        }
        return {"store": self.store.arrays(), "policy": self.policy.arrays()}, json.dumps(rest)

    @classmethod
    def from_state(cls, state: tuple[dict[str, dict[str, mx.array]], str]) -> Self:
        """Rebuild a cache, its policy and its store from `state` alone.

        Raises:
            SpecError: if the method is not installed.
        """
        arrays, rest = state[0], json.loads(state[1])
        policy, store = Spec.parse(rest["origin"]["spec"]).create(Geometry(**rest["origin"]["geometry"]))
        store.load(arrays.get("store", {}), rest["store"])
        policy.load(arrays.get("policy", {}), rest["policy"])
        cache = cls(policy, store, rest["origin"])
        cache._width, cache._left, cache._right, cache._due, cache._numbers = rest["layout"]
        return cache

    @property
    def rollback(self) -> int | None:
        """How many of the newest tokens `trim` can take back; None for any number."""
        return 0 if self.policy.evicts else self.store.rollback

    def is_trimmable(self) -> bool:
        """Tell whether the newest tokens can be taken back, at least `rollback` of them."""
        return self.rollback != 0

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens, exactly.

        Raises:
            ValueError: if the store cannot: its `rollback` is smaller, or some of it has been taken back already.
        """
        n = min(n, self._width)
        if n < 0 or self.policy.evicts or not self.store.can_truncate(n):
            possible = [] if self.policy.evicts else [m for m in range(max(n, 0) + 1) if self.store.can_truncate(m)]
            most = max(possible, default=0)
            raise ValueError(f"[mlx_kv] expected to take back at most {most} tokens, got {n}")
        self.store.truncate(n)
        self._width -= n
        return n

    def _sees_all(self, mask: attention.Mask) -> bool:
        """Tell whether a single token sees all rows held; in a batch and after eviction the mask says no more."""
        if self._left is None and not self.policy.evicts:
            return mask is None
        return not isinstance(mask, mx.array) or mask.dtype == mx.bool_

    def _rows_mask(self, mask: attention.Mask, chunk: int) -> attention.Mask:
        """Turn the model's mask over tokens seen into one over rows held."""
        if self._left is None and not self.policy.evicts:
            return mask
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            raise ValueError("[mlx_kv] an additive mask cannot be applied to a batch or after eviction")
        # The probe admitted this layer because its masks are make_mask's own: causality and padding, which the lengths
        # tell as well.
        if self._left is None:
            return None if chunk == 1 else "causal"
        held = self.store.lengths
        if chunk == 1 and len(set(held)) == 1:
            return None
        return attention.ragged_mask(held, self._spans, chunk, max(held))


@cache
def _nan(dtype: mx.Dtype) -> mx.array:
    return mx.array(float("nan"), dtype)
