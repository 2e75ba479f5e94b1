"""SnapKV: keep the rows of a prompt that its last tokens look at (Li et al., arXiv 2404.14469)."""

from .config import SnapKV
from .select import select

__all__ = ["SnapKV", "select"]
