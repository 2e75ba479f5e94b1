"""The reference of policies that select by a window's queries: all rows are held, a mask hides the dropped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ..seam import SeamCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class MaskedCache(SeamCache):
    """Stands where a compressed layer's cache would, and answers with float32 attention over a boolean mask."""

    def __init__(
        self, rows_kept: Callable[[int], int], window: int, kernel_size: int = 7, pooling: str = "max"
    ) -> None:
        """Make an empty cache.

        Args:
            rows_kept: rows to keep of so many tokens seen, once a prompt has ended.
            window: newest rows, whose queries vote.
            kernel_size: neighbours pooled over.
            pooling: "max" or "avg".
        """
        self.own: Any = KVCache()
        self.rows_kept, self.window, self.kernel_size, self.pooling = rows_kept, window, kernel_size, pooling
        self.visible: NDArray[np.bool_] | None = None  # [kv_heads, tokens]
        self.queries: list[Floats] = []  # [query_heads, tokens, dim] of the present prompt's chunks
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        """Be mlx-lm's cache in everything else."""
        return getattr(self.own, name)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend to what is still visible, then hide rows if a prompt has ended."""
        chunk, tokens, kv_heads = queries.shape[2], keys.shape[2], keys.shape[1]
        new = np.ones((kv_heads, chunk), bool)
        visible = new if self.visible is None else np.concatenate([self.visible, new], axis=1)
        causal = np.arange(tokens) <= np.arange(tokens - chunk, tokens)[:, None]
        explicit = np.repeat(visible, queries.shape[1] // kv_heads, axis=0)[:, None] & causal
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mx.array(cast(Any, explicit[None])), sinks=sinks
        )
        if chunk > 1 and not self.armed:
            self.queries = []
        ended = chunk == 1 and self.armed
        self.armed = chunk > 1
        if chunk > 1 or ended:
            self.queries.append(_exact(queries))
        kept = self.rows_kept(tokens)
        if ended and kept < visible[0].sum():
            watching = np.concatenate(self.queries, axis=1)[:, -self.window :]
            extra = None if sinks is None else _exact(sinks[None])
            visible = self._hide(watching, _exact(keys), visible, kept, scale, extra)
        self.visible = visible
        return output

    def _hide(
        self,
        queries: Floats,
        keys: Floats,
        visible: NDArray[np.bool_],
        kept: int,
        scale: float,
        sinks: Floats | None,
    ) -> NDArray[np.bool_]:
        group = queries.shape[0] // keys.shape[0]
        still = np.zeros_like(visible)
        for head, rows in enumerate(np.flatnonzero(row) for row in visible):
            own = slice(head * group, (head + 1) * group)
            extra = None if sinks is None else sinks[own]
            options = self.window, self.kernel_size, self.pooling, scale, extra
            scores = window_scores(queries[own], keys[head, rows], *options)
            best = np.lexsort((np.arange(len(scores)), -scores))[: kept - self.window]
            still[head, rows[best]] = True
            still[head, rows[len(scores) :]] = True
        return still


def window_scores(
    queries: Floats,
    keys: Floats,
    window: int,
    kernel_size: int,
    pooling: str,
    scale: float,
    sinks: Floats | None = None,
) -> Floats:
    """Return the pooled votes of one KV head's rows before the window, in float64 and row by row: [rows - window].

    Args:
        queries: [group, newest tokens, dim].
        keys: [rows, dim].
        window: last rows, which are always kept.
        kernel_size: neighbours pooled over.
        pooling: "max" or "avg".
        scale: what dot products are multiplied with.
        sinks: one logit per query head that joins the softmax.
    """
    rows, half = len(keys), kernel_size // 2
    votes = np.zeros(rows)
    for head, own in enumerate(queries):
        for i, query in enumerate(own):
            seen = rows - len(own) + i + 1
            logits = scale * keys[:seen] @ query
            extra = -np.inf if sinks is None else sinks[head]
            largest = max(logits.max(), extra)
            weights = np.exp(logits - largest)
            votes[:seen] += weights / (weights.sum() + np.exp(extra - largest)) / len(queries)
    votes = votes[: rows - window]
    near = [votes[max(row - half, 0) : row + half + 1] for row in range(rows - window)]
    return np.array([part.max() if pooling == "max" else part.sum() / kernel_size for part in near])


def _exact(array: mx.array) -> Floats:
    return np.array(array[0].astype(mx.float32)).astype(np.float64)
