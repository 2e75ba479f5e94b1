"""MLX arrays as plain memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .buffers import Argument, poisoned
from .signature import numpy_dtype


def to_numpy(array: mx.array) -> NDArray[Any]:
    """A view of an array's memory, strides included."""
    mx.eval(array)  # pyright: ignore[reportUnknownMemberType]
    bits: Any = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(bits)


def memory(array: mx.array, row_contiguous: bool) -> tuple[NDArray[Any], list[int], int]:
    """The memory that an array spans, its strides in elements, and the offset of its first element in bytes."""
    view = to_numpy(array)
    if row_contiguous:
        view = np.ascontiguousarray(view)
    itemsize = view.itemsize
    strides = [stride // itemsize for stride in view.strides]
    if view.flags.c_contiguous:
        return view.reshape(-1), strides, 0
    reach = [stride * (size - 1) for stride, size in zip(strides, view.shape, strict=True)]
    first = -sum(r for r in reach if r < 0)
    spanned = np.zeros(first + sum(r for r in reach if r > 0) + 1, view.dtype)
    np.lib.stride_tricks.as_strided(spanned[first:], view.shape, view.strides)[...] = view
    return spanned, strides, first * itemsize


def output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Argument:
    """Memory for an output: filled with `init_value`, or poisoned."""
    data = poisoned(int(np.prod(shape)), numpy_dtype(dtype))
    if init_value is not None:
        data[...] = to_numpy(mx.array(init_value, dtype))
    return Argument(name, data, writable=True, initialised=init_value is not None)


def to_mlx(data: NDArray[Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array of that shape and dtype whose bits are in `data`."""
    array = mx.array(data.reshape(tuple(shape)))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
