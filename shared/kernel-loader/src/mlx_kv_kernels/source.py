"""A `.metal` file becomes the header and the body that mx.fast.metal_kernel and mx.fast.cuda_kernel take.

The file holds helper functions, then the line `// --- body ---`, then the statements of the kernel. MLX writes the
signature. `#line` directives keep the file's own name and line numbers in every compiler's messages.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Literal

BODY_MARKER = "// --- body ---"
_THREADGROUP_POINTER = re.compile(r"\bthreadgroup\s+(?:const\s+)?[\w:]+(?:<[^<>;]*>)?\s*\*")
_COMMENT = re.compile(r"//[^\n]*")


@cache
def read(package: str, resource: str) -> str:
    """The text of a file that an installed package carries."""
    return files(package).joinpath(resource).read_text(encoding="utf-8")


def split(text: str, filename: str) -> tuple[str, str]:
    """(helpers, body), each beginning with the `#line` of its first line in the file."""
    lines = text.splitlines()
    if lines.count(BODY_MARKER) != 1:
        raise ValueError(f"[{filename}] expected one line {BODY_MARKER!r}, got {lines.count(BODY_MARKER)}")
    marker = lines.index(BODY_MARKER)
    helpers = [f'#line 1 "{filename}"', *lines[:marker]]
    body = [f'#line {marker + 2} "{filename}"', *lines[marker + 1 :]]
    return "\n".join(helpers) + "\n", "\n".join(body) + "\n"


@cache
def joined(files: tuple[tuple[str, str], ...]) -> str:
    """The text of a kernel from files, each a name and a text: their helpers, then the bodies of some of them."""
    parts = [split(text if BODY_MARKER in text else f"{text}{BODY_MARKER}\n", name) for name, text in files]
    return "".join([*(helpers for helpers, _ in parts), BODY_MARKER + "\n", *(body for _, body in parts)])


def repeated(text: str, count: int) -> str:
    """A file's text with its body `count` times, for kernels of any number of arrays: @ becomes 0, 1, ..."""
    helpers, marker, body = text.partition(BODY_MARKER)
    return helpers + marker + "".join([body.replace("@", str(i)) for i in range(count)])


def compose(
    text: str, filename: str, language: Literal["metal", "cuda"], launch_bounds: tuple[int, ...] = ()
) -> tuple[str, str]:
    """(header, body) of a kernel for MLX, with what the language needs around them.

    `launch_bounds` is CUDA's: threads of a threadgroup and, if given, threadgroups that must fit on one multiprocessor.

    Raises:
        ValueError: the text names a type of pointers that CUDA does not have.
    """
    if pointer := _THREADGROUP_POINTER.search(_COMMENT.sub("", text)):
        raise ValueError(
            f"[{filename}] expected pointers to threadgroup memory that are `auto` or of a template's type, got "
            f"{pointer[0]!r}, which CUDA does not have"
        )
    helpers, body = split(text, filename)
    matrices = "simdgroup_matrix" in text or "8x8" in text
    if language == "metal":
        return _own("portable.metal") + (_own("matrices.metal") if matrices else "") + helpers, body
    prelude = _own("cuda/prelude.cuh")
    if matrices:
        prelude = "#define MLX_KV_MATRIX_LANES\n" + prelude + _own("cuda/matrices.cuh")
    if launch_bounds:
        # MLX writes `__global__` before the kernel's name and has no other place for the bounds.
        bounds = ", ".join(map(str, launch_bounds))
        prelude += f"#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({bounds})\n"
    return prelude + helpers, _own("cuda/positions.cuh") + body


def _own(resource: str) -> str:
    return f'#line 1 "{resource}"\n' + read("mlx_kv_kernels", resource)
