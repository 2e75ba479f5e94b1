"""Example: keep a prompt's first rows and its newest (Xiao et al., arXiv 2309.17453)."""

from .config import Example
from .reference import select

__all__ = ["Example", "select"]
