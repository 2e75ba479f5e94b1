"""Kernel texts in files, so that what MLX is given for CUDA only names them."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock

_lock = Lock()
_WORDS = ("shape", "strides", "ndim")  # MLX hands these of an input over where the body names them


def included(name: str, header: str, body: str, input_names: Sequence[str]) -> tuple[str, str]:
    """Write a kernel's header and body to files; return texts of one line that include them.

    MLX copies a kernel's text at every launch, which costs the host more than the launch itself (benchmarks/launch.py
    measures it). The files stay until this process ends: MLX compiles a kernel when its outputs are first evaluated.
    """
    mentioned = [f"{x}_{word}" for x in input_names for word in _WORDS if f"{x}_{word}" in body]
    header = _include(f"{name}.header.cuh", header)
    return header, "".join(f"// {word}\n" for word in mentioned) + _include(f"{name}.body.cuh", body)


def _include(filename: str, text: str) -> str:
    with _lock:  # threads that come first together share one folder
        path = _folder(os.getpid()) / filename
    path.write_text(text, encoding="utf-8")
    return f'#include "{path.as_posix()}"\n'


@cache
def _folder(process: int) -> Path:
    folder = Path(mkdtemp(prefix="mlx_kv_kernels_"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves its parent's files alone
        shutil.rmtree(folder, ignore_errors=True)
