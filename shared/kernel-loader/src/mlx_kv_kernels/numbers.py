"""Numbers that a launch hands to its kernel."""

from __future__ import annotations

from functools import lru_cache
from threading import get_ident

import mlx.core as mx


@lru_cache(256)  # the layers of a model usually ask for the same ones
def numbers(values: tuple[int | float, ...], dtype: mx.Dtype) -> mx.array:
    """An array [len(values)] where kernels read it fast; the same object for the same values. For constants."""
    array = _made(values, dtype)
    mx.async_eval(array)  # now, and not in whichever graph or thread uses it first
    return array


def new_numbers(values: tuple[int | float, ...], dtype: mx.Dtype) -> mx.array:
    """Return the same for numbers that are new at every token.

    They come about in the graph that uses them first, as one small kernel of it: a graph of their own, as `numbers`
    starts, costs the host many times that. Not to be captured by a compiled function, which would make them again at
    every call.
    """
    return _new_numbers(values, dtype, get_ident())


@lru_cache(256)
def _new_numbers(values: tuple[int | float, ...], dtype: mx.Dtype, thread: int) -> mx.array:
    # Each thread has its own: what is not yet evaluated belongs to the stream of the thread that made it.
    return _made(values, dtype)


def _made(values: tuple[int | float, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.array(values, dtype)
    # MLX leaves an array made from Python in the host's memory, which a CUDA device reads over the bus, every
    # threadgroup for itself. What the device has computed lies in its own memory.
    return array + 0 if mx.default_device() == mx.gpu and mx.cuda.is_available() else array
