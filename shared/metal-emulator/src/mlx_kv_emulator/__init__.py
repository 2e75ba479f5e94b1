"""Runs Metal kernels on any CPU, with race checks: mx.fast.metal_kernel for tests."""

from .abi import ALLOWABLE, KINDS
from .counters import Launch, Traffic, counters, last_launch
from .errors import Access, CompileError, EmulatorError, Finding, Place, Thread, UnavailableError
from .functions import run_kernel_function
from .kernel import MetalKernel, metal_kernel
from .settings import Settings, current_settings, settings
from .toolchain import available

__all__ = [
    "ALLOWABLE",
    "KINDS",
    "Access",
    "CompileError",
    "EmulatorError",
    "Finding",
    "Launch",
    "MetalKernel",
    "Place",
    "Settings",
    "Thread",
    "Traffic",
    "UnavailableError",
    "available",
    "counters",
    "current_settings",
    "last_launch",
    "metal_kernel",
    "run_kernel_function",
    "settings",
]
