"""Numbers that a launch hands to its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from threading import get_ident

import mlx.core as mx

from . import source
from .backend import Backend
from .kernel import SIMD_WIDTH, Kernel
from .launch import Launch, launches

_LAUNCHED = 32  # numbers that one launch joins: Metal takes 31 arrays
_MOST = 2 * _LAUNCHED  # numbers that are joined: those of large batches would take more launches than they spare
_IN_THE_POOL = 2  # numbers of 4 bytes that lie where the device reads them from the start: see `join_numbers`

Values = tuple[int | float, ...]


@lru_cache(256)  # the layers of a model usually ask for the same ones
def numbers(values: Values, dtype: mx.Dtype) -> mx.array:
    """An array [len(values)] where kernels read it fast; the same object for the same values. For constants."""
    array = _made(values, dtype)
    mx.async_eval(array)  # now, and not in whichever graph or thread uses it first
    return array


def new_numbers(values: Values, dtype: mx.Dtype) -> mx.array:
    """Return the same for numbers, of 4 bytes each, that are new at every token.

    They come about in the graph that uses them first, as one small kernel of it where they are more than two: a graph
    of their own, as `numbers` starts, costs the host many times that. Not to be captured by a compiled function, which
    would make them again at every call.
    """
    return _new_numbers(values, dtype, get_ident())


@lru_cache(256)
def _new_numbers(values: Values, dtype: mx.Dtype, thread: int) -> mx.array:
    # Each thread has its own: what is not yet evaluated belongs to the stream of the thread that made it.
    return _made(values, dtype)


def _made(values: Values, dtype: mx.Dtype) -> mx.array:
    if len(values) <= _IN_THE_POOL or mx.default_device() != mx.gpu or not mx.cuda.is_available():
        return mx.array(values, dtype)
    if not 0 < len(values) <= _MOST:
        # MLX leaves an array made from Python in the host's memory, which a CUDA device reads over the bus, every
        # threadgroup for itself. What the device has computed lies in its own memory.
        return mx.array(values, dtype) + 0
    parts = [join_numbers(values[i : i + _LAUNCHED], dtype, "cuda") for i in range(0, len(values), _LAUNCHED)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def join_numbers(values: Values, dtype: mx.Dtype, backend: Backend) -> mx.array:
    """Make an array of at most 32 numbers of 4 bytes in the device's own memory, from pairs of them.

    An array of more than 8 bytes that Python makes on CUDA may be given a used buffer of the device's, which MLX first
    moves into memory that both share, waiting for the device. Arrays of 8 bytes come from a pool that lies there.
    """
    count = len(values)
    values = values if count % 2 == 0 else (*values, values[-1])
    pairs = [mx.array(values[i : i + 2], dtype) for i in range(0, count, 2)]
    launched = 1 << (len(pairs) - 1).bit_length()  # few numbers of pairs, as each is a kernel to be compiled
    pairs += pairs[-1:] * (launched - len(pairs))
    joined = _joiner(launched, dtype, backend)(pairs)[0]
    return joined if count == 2 * launched else joined[:count]


@dataclass(frozen=True)
class JoinNumbers(Kernel):
    """join_numbers for a number of pairs: its body once for each."""

    @property
    def text(self) -> str:
        """The file's text for so many pairs."""
        return source.repeated(super().text, len(self.input_names))


@cache
def kernel_of(pairs: int) -> JoinNumbers:
    """Return the kernel for so many pairs."""
    names = tuple([f"pair{i}" for i in range(pairs)])
    return JoinNumbers("join_numbers", "mlx_kv_kernels", names, ("numbers",))


@launches
def _joiner(pairs: int, dtype: mx.Dtype, backend: Backend) -> Launch:
    return kernel_of(pairs).prepare(
        inputs=[(dtype, (2,))] * pairs,
        grid=(SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        output_shapes=[(2 * pairs,)],
        output_dtypes=[dtype],
        backend=backend,
    )
