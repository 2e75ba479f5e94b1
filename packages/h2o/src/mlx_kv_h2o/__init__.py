"""H2O: keep the rows that all queries so far have looked at most (Zhang et al., arXiv 2306.14048)."""

from .config import H2O
from .scores import column_sums, select

__all__ = ["H2O", "column_sums", "select"]
