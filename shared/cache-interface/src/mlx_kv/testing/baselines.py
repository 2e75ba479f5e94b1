"""What a policy must beat: rows kept without looking at the queries."""

from __future__ import annotations

import mlx.core as mx

from ..policy import Attended
from ..window import WindowOptions, WindowPolicy


class LastRows(WindowPolicy):
    """Keeps the newest rows when a prompt ends."""

    def choose(self, queries: mx.array, keys: mx.array, kept: int, chunk: Attended) -> mx.array:
        """Return the last `kept` rows."""
        rows = keys.shape[2]
        return mx.broadcast_to(mx.arange(rows - kept, rows), (1, keys.shape[1], kept))


class RandomRows(WindowPolicy):
    """Keeps the window and random rows before it, other ones in each KV head."""

    def __init__(self, options: WindowOptions, seed: int = 0) -> None:
        """Make a policy that has seen nothing."""
        super().__init__(options)
        self.key = mx.random.key(seed)

    def choose(self, queries: mx.array, keys: mx.array, kept: int, chunk: Attended) -> mx.array:
        """Return random rows in ascending order, then the window."""
        rows, heads, window = keys.shape[2], keys.shape[1], self.options.window
        drawn = mx.argsort(mx.random.uniform(shape=(1, heads, rows - window), key=self.key), axis=-1)
        last = mx.broadcast_to(mx.arange(rows - window, rows, dtype=drawn.dtype), (1, heads, window))
        return mx.sort(mx.concatenate([drawn[..., : kept - window], last], axis=-1), axis=-1)
