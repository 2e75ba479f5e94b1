"""A fast BLAS for MLX's CPU backend on Linux, from the PyPI package ngsolve-openblas.

The BLAS inside MLX's Linux wheel is the plain reference one (about 3 GFLOP/s); OpenBLAS is about 40 times faster.
Loaded first and globally, its symbols win over MLX's own. Import this module and call `load_openblas` before anything
imports mlx; nothing here does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from pathlib import Path

OPENBLAS = "ngsolve-openblas"  # built for every x86-64 CPU; cmeel-openblas dies on CPUs without AVX-512
GFORTRAN = b"libgfortran.so.5"


class BlasError(RuntimeError):
    """OpenBLAS is installed but could not be put in front of MLX's own BLAS."""


@functools.cache
def load_openblas() -> Path | None:
    """Make MLX's CPU backend use OpenBLAS, and return the library's path.

    Returns None where there is nothing to do: not on Linux, MLX's CUDA backend is installed, or OpenBLAS is not.
    Raises BlasError when OpenBLAS is installed but mlx is already loaded or the library cannot be loaded.
    """
    if not uses_cpu_backend():
        return None
    library = next(iter(_files(OPENBLAS, "libopenblas")), None)
    if library is None:
        return None
    if "mlx.core" in sys.modules:
        raise BlasError("mlx was imported before OpenBLAS could be loaded; call load_openblas() first")
    try:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if GFORTRAN.decode() not in str(error):
                raise
            _load_gfortran_of_mlx()
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BlasError(f"OpenBLAS at {library} cannot be loaded: {error}") from error
    return library


def uses_cpu_backend() -> bool:
    """Whether MLX on this machine runs on the CPU of a Linux system, told without importing it."""
    return (
        sys.platform == "linux"
        and _is_installed("mlx-cpu")
        and not any(map(_is_installed, ("mlx-cuda-12", "mlx-cuda-13")))
    )


def _load_gfortran_of_mlx() -> None:
    """Load the Fortran runtime that OpenBLAS wants from MLX's wheel, for systems without one.

    The wheel's copy carries a name of its own (libgfortran-<hash>.so.5.0.0), which the dynamic linker does not take
    for libgfortran.so.5. A copy in memory gets the plain name.
    """
    for library in _files("mlx-cpu", "libquadmath"):
        ctypes.CDLL(str(library))
    for library in _files("mlx-cpu", "libgfortran"):
        name = library.name.encode()
        image = library.read_bytes().replace(name + b"\0", GFORTRAN.ljust(len(name) + 1, b"\0"))
        handle = os.memfd_create("libgfortran")
        try:
            with open(handle, "wb", closefd=False) as file:
                file.write(image)
            ctypes.CDLL(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)


def _files(distribution: str, prefix: str) -> list[Path]:
    """The installed files of a distribution whose names start with `prefix`."""
    if not _is_installed(distribution):
        return []
    files = importlib.metadata.files(distribution) or []
    return [Path(str(file.locate())) for file in files if file.name.startswith(prefix)]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
