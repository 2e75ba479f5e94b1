"""Keyformer: keep key tokens by noisy, tempered attention scores (Adnan et al., arXiv 2403.09054)."""

from .config import Keyformer, temperature
from .scores import noise, scores, select

__all__ = ["Keyformer", "noise", "scores", "select", "temperature"]
