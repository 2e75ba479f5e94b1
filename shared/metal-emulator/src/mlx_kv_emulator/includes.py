"""MLX's own Metal headers, which the mlx package ships, written into a source in place of their #include lines."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import mlx.core as mx

MSL_FOLDER = Path(__file__).parent / "msl"
_INCLUDE = re.compile(r'\s*#\s*include\s+"(mlx/[^"]+)"')

UTILS = '#include "mlx/backend/metal/kernels/utils.h"\n'


@functools.cache
def mlx_include_folder() -> Path:
    """The folder that holds `mlx/backend/metal/kernels`."""
    folder = Path(mx.__file__).parent / "include"
    if not (folder / "mlx/backend/metal/kernels/utils.h").exists():
        raise FileNotFoundError(f"the mlx package has no Metal headers in {folder}")
    return folder


def expand(source: str, file: str, seen: set[str] | None = None) -> str:
    """`source` with every MLX header in place of its first #include, and #line so that messages name the header.

    Headers that this package replaces (in its `msl` folder) stay #include lines.
    """
    seen = set() if seen is None else seen
    lines: list[str] = []
    for number, line in enumerate(source.split("\n"), 1):
        found = _INCLUDE.match(line)
        if not found or (MSL_FOLDER / found[1]).exists():
            lines.append(line if line.strip() != "#pragma once" else "")
        elif found[1] in seen:
            lines.append("")
        else:
            seen.add(found[1])
            text = (mlx_include_folder() / found[1]).read_text()
            lines += [f'#line 1 "{found[1]}"', expand(text, found[1], seen), f'#line {number + 1} "{file}"']
    return "\n".join(lines)


@functools.cache
def prelude() -> str:
    """What MLX puts before every custom kernel: its utils.h, expanded."""
    return expand(UTILS, "prelude")
