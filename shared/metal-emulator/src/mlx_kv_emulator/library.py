"""Compiled kernels in this process."""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from pathlib import Path

from . import abi
from .build import runtime_library
from .toolchain import MACOS

# The runtime keeps its state in globals and ctypes drops the interpreter's lock, so launches take turns.
LOCK = threading.Lock()


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime; kernels find its functions because it is loaded globally, as are the system's that both call."""
    if not MACOS:
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: its entry point and where its memory lies."""

    handle: ctypes.CDLL
    entry: int
    threadgroup_begin: int
    threadgroup_end: int
    image_begin: int
    image_end: int
    sites: int
    variables: int
    variable_count: int

    @property
    def threadgroup_memory(self) -> int:
        """Bytes of threadgroup memory that the kernel declares."""
        if not self.variable_count:
            return self.threadgroup_end - self.threadgroup_begin
        table = (abi.Variable * self.variable_count).from_address(self.variables)
        return sum(variable.size for variable in table)


@functools.cache
def load(path: Path) -> Kernel:
    """Loads a kernel library once per process."""
    runtime()
    handle = ctypes.CDLL(str(path))
    bounds = (ctypes.c_void_p * 4)()
    with LOCK:  # in mode check it is instrumented, and would count as a part of a launch that runs meanwhile
        handle.msl_bounds(bounds)
    checked = hasattr(handle, "msl_sites")
    return Kernel(
        handle,
        ctypes.cast(handle.msl_entry, ctypes.c_void_p).value or 0,
        *(bound or 0 for bound in bounds),
        sites=_address(handle, "msl_sites") if checked else 0,
        variables=_address(handle, "msl_variables") if checked else 0,
        variable_count=ctypes.c_int.in_dll(handle, "msl_variable_count").value if checked else 0,
    )


def _address(handle: ctypes.CDLL, symbol: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(handle, symbol))
