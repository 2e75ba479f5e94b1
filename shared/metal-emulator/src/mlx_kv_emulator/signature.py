"""The kernel around a body, as mx.fast.metal_kernel writes it (mlx/backend/metal/custom_kernel.cpp)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .attributes import ATTRIBUTES

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# Arrays with fewer elements are passed in the constant address space.
MAX_CONSTANT_ELEMENTS = 8

Template = Sequence[tuple[str, bool | int | mx.Dtype]]


def type_name(dtype: mx.Dtype) -> str:
    """The MSL type of a dtype."""
    if dtype not in TYPES:
        raise ValueError(f"[metal_kernel] expected a dtype that Metal has, got {dtype}")
    return TYPES[dtype]


def numpy_dtype(dtype: mx.Dtype) -> np.dtype[Any]:
    """The NumPy dtype that holds the bits of a dtype: uint16 for bfloat16."""
    return np.dtype(np.uint16 if dtype == mx.bfloat16 else str(dtype).rpartition(".")[2].rstrip("_"))


def function_name(kernel: str) -> str:
    """The name of the generated function."""
    return "custom_kernel_" + re.sub(r"\W", "_", kernel)


def template_header(template: Template) -> str:
    """`template <typename T, int N>` for a list of template arguments."""
    kinds: list[str] = []
    for name, value in template:
        if isinstance(value, bool):
            kinds.append(f"bool {name}")
        elif isinstance(value, int):
            kinds.append(f"int {name}")
        elif isinstance(value, mx.Dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            kinds.append(f"typename {name}")
        else:
            raise ValueError(
                f"[metal_kernel] expected a bool, an int or a Dtype for {name}, got {type(value).__name__}"
            )
    return f"template <{', '.join(kinds)}>\n" if kinds else ""


def template_arguments(template: Template) -> str:
    """`<float, 4>` for a list of template arguments."""
    values = [type_name(v) if isinstance(v, mx.Dtype) else str(v).lower() for _, v in template]
    return f"<{', '.join(values)}>" if values else ""


def shape_arguments(name: str, source: str) -> list[str]:
    """Which of `shape`, `strides` and `ndim` of an input the source uses."""
    return [extra for extra in ("shape", "strides", "ndim") if f"{name}_{extra}" in source]


def parameters(
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    atomic_outputs: bool,
) -> list[str]:
    """The parameters of the generated function, in order: inputs with their shapes, outputs, attributes."""
    extra_types = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}
    texts: list[str] = []
    for name, array in inputs:
        space = "constant" if array.size < MAX_CONSTANT_ELEMENTS else "device"
        texts.append(f"const {space} {type_name(array.dtype)}{'*' if array.ndim else '&'} {name}")
        if array.ndim:
            texts += [f"const constant {extra_types[e]} {name}_{e}" for e in shape_arguments(name, source)]
    for name, dtype in outputs:
        held = f"atomic<{type_name(dtype)}>" if atomic_outputs else type_name(dtype)
        texts.append(f"device {held}* {name}")
    texts = [f"{text} [[buffer({i})]]" for i, text in enumerate(texts)]
    return texts + [f"{kind} {name} [[{name}]]" for name, (kind, _) in ATTRIBUTES.items() if name in source]
