"""PyramidKV: SnapKV's selection with more rows in lower layers than in upper ones (Cai et al., arXiv 2406.02069)."""

from .budgets import layer_budgets
from .config import PyramidKV

__all__ = ["PyramidKV", "layer_budgets"]
