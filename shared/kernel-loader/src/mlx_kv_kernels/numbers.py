"""Numbers that a launch hands to its kernel."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx


@lru_cache(256)  # the layers of a model usually ask for the same ones
def numbers(values: tuple[int | float, ...], dtype: mx.Dtype) -> mx.array:
    """An array [len(values)] where kernels read it fast; the same object for the same values.

    MLX leaves an array made from Python in the host's memory, which a CUDA device reads over the bus, every threadgroup
    for itself. What the device has computed lies in its own memory.
    """
    array = mx.array(values, dtype)
    if mx.default_device() != mx.gpu or not mx.cuda.is_available():
        return array
    copy = array + 0
    mx.async_eval(copy)  # now, and not in whichever graph or thread uses it first
    return copy
