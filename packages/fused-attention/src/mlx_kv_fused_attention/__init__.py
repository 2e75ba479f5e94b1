"""Split-KV decode attention that reads packed rows as they are."""

from .attend import Attention, attend
from .merge import merge_splits

__all__ = ["Attention", "attend", "merge_splits"]
