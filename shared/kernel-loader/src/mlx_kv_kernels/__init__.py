"""One Metal kernel source on Metal, CUDA and a CPU emulator; top-k and gather of KV cache rows."""

from .backend import BACKENDS, Backend, UnavailableBackendError, backends, resolve_backend
from .kernel import Kernel
from .rows import gather_rows, topk_rows

__all__ = [
    "BACKENDS",
    "Backend",
    "Kernel",
    "UnavailableBackendError",
    "backends",
    "gather_rows",
    "resolve_backend",
    "topk_rows",
]
