"""KV-cache compression for every mlx-lm model."""

from .cache import CompressedKVCache
from .dense import Dense, DenseStore
from .errors import CacheFileError, SpecError, UnsupportedModelError
from .factory import install, make_prompt_cache
from .persistence import load_prompt_cache, save_prompt_cache
from .plugins import MethodInfo, methods
from .policy import Attended, KeepAll, KeepAllPolicy, Policy, PromptEnd
from .report import LayerMemory, MemoryReport, memory_report
from .store import Geometry, Store

__all__ = [
    "Attended",
    "CacheFileError",
    "CompressedKVCache",
    "Dense",
    "DenseStore",
    "Geometry",
    "KeepAll",
    "KeepAllPolicy",
    "LayerMemory",
    "MemoryReport",
    "MethodInfo",
    "Policy",
    "PromptEnd",
    "SpecError",
    "Store",
    "UnsupportedModelError",
    "install",
    "load_prompt_cache",
    "make_prompt_cache",
    "memory_report",
    "methods",
    "save_prompt_cache",
]
