"""A folder of compiled objects. Files appear whole or not at all, so that processes can share it."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """MLX_KV_EMULATOR_CACHE, or `mlx-kv-emulator` in the user's cache folder. It is made if need be."""
    given = os.environ.get("MLX_KV_EMULATOR_CACHE")
    if given:
        folder = Path(given)
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches" / "mlx-kv-emulator"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-kv-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(*parts: str | bytes) -> str:
    """A name for everything in `parts`, whose order and borders matter."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:24]


def build_once(name: str, build: Callable[[Path, Path], None]) -> Path:
    """The cached file `name`, built first if it is not there.

    `build(folder, target)` writes `target`, which lies in the scratch `folder`. When two processes build the same file
    at once, each builds it whole and the second replaces the first's by its equal.
    """
    cached = cache_folder() / name
    if cached.exists():
        return cached
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix="build-") as scratch:
        target = Path(scratch) / name
        build(Path(scratch), target)
        os.replace(target, cached)
    return cached
