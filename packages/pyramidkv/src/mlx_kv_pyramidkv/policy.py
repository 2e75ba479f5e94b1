"""The policy of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_kv.window import WindowPolicy

from .budgets import layer_budgets

if TYPE_CHECKING:
    from mlx_kv import Geometry

    from .config import PyramidKV


class PyramidKVPolicy(WindowPolicy):
    """Selects as SnapKV does, each layer its own number of rows."""

    def __init__(self, config: PyramidKV, geometry: Geometry) -> None:
        """Make a policy that has seen nothing."""
        super().__init__(config)
        self.beta = config.beta
        self.index, self.layers = geometry.index, geometry.layers

    def rows_kept(self, budget: int, seen: int) -> int:
        """Return how many rows this layer keeps of `seen` tokens."""
        return layer_budgets(self.layers, budget, self.options.window, self.beta, seen)[self.index]
