"""Which backend runs a kernel: Metal, CUDA, the CPU emulator, or the reference in plain MLX ops."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, cast

import mlx.core as mx

Backend = Literal["metal", "cuda", "emulator", "reference"]
BACKENDS: tuple[Backend, ...] = ("metal", "cuda", "emulator", "reference")
ENVIRONMENT_VARIABLE = "MLX_KV_BACKEND"

_log = logging.getLogger("mlx_kv_kernels")


class UnavailableBackendError(RuntimeError):
    """A backend asked for by name cannot run here; the message says what is missing."""


def backends() -> dict[Backend, tuple[bool, str]]:
    """Every backend's name, whether it can run a kernel now, and a sentence that says why (not)."""
    return {name: usable() for name, usable in _USABLE.items()}


def resolve_backend(backend: str | None = None) -> Backend:
    """The backend an op runs on: the argument, else the environment variable MLX_KV_BACKEND, else "auto".

    "auto" is Metal or CUDA where MLX has that GPU as its default device, else the reference; never the emulator.

    Raises:
        UnavailableBackendError: a backend was asked for by name and cannot run here.
        ValueError: the name is none of auto, metal, cuda, emulator, reference.
    """
    asked_by = "backend" if backend else ENVIRONMENT_VARIABLE
    name = backend or os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    if name == "auto":
        return _automatic()
    if name not in BACKENDS:
        raise ValueError(f"[mlx_kv_kernels] expected {asked_by} one of auto, {', '.join(BACKENDS)}, got {name!r}")
    usable, reason = _USABLE[name]()
    if not usable:
        raise UnavailableBackendError(f"[mlx_kv_kernels] {asked_by}={name!r} was asked for and cannot run: {reason}")
    return name


def _automatic() -> Backend:
    if mx.default_device() == mx.gpu:
        return "metal" if mx.metal.is_available() else "cuda"
    _log_reference_once()
    return "reference"


@cache
def _log_reference_once() -> None:
    _log.info("Kernels run as plain MLX ops: MLX's default device is the CPU.")


def _gpu(name: str, available: bool) -> tuple[bool, str]:
    if not available:
        return False, f"This build of MLX has no {name} backend, or found no {name} device."
    if mx.default_device() != mx.gpu:
        return False, f"{name} is there, but MLX's default device is the CPU: call mx.set_default_device(mx.gpu)."
    return True, f"MLX's default device is a {name} GPU."


def emulator() -> Any:
    """The optional package mlx_kv_emulator; ImportError where it is not installed."""
    return cast(Any, importlib.import_module("mlx_kv_emulator"))


def _emulator() -> tuple[bool, str]:
    try:
        module = emulator()
    except ModuleNotFoundError as error:
        if error.name != "mlx_kv_emulator":
            raise
        return False, "The package mlx-kv-emulator is not installed."
    return module.available()


_USABLE: dict[Backend, Callable[[], tuple[bool, str]]] = {
    "metal": lambda: _gpu("Metal", mx.metal.is_available()),
    "cuda": lambda: _gpu("CUDA", mx.cuda.is_available()),
    "emulator": _emulator,
    "reference": lambda: (True, "Plain MLX ops run on every device."),
}
