"""RVQ's two kernels: which arrays they take, and their launches."""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

import mlx.core as mx

from mlx_kv_kernels import Backend, Kernel, UnavailableBackendError, resolve_backend
from mlx_kv_kernels.backend import ENVIRONMENT_VARIABLE
from mlx_kv_kernels.kernel import CONSTANT_BELOW
from mlx_kv_kernels.launch import launches
from mlx_kv_kernels.numbers import numbers

from .codebook import codebooks, midpoints
from .config import BLOCK
from .reference import Encoded, words_of
from .rotation import negative, negative_columns, odd_part

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_THREADS = 128

_log = logging.getLogger("mlx_kv_rvq")
_TEMPLATE = ("T", "DIM", "ODD", "BITS", "STAGES", "CENTER", "SCALE")

ENCODE = Kernel(
    "encode",
    "mlx_kv_rvq",
    ("x", "signs", "hadamard", "codebook", "params"),
    ("codes", "norm", "mean"),
    template=(*_TEMPLATE, "UNBIASED"),
    ensure_row_contiguous=False,
)
DECODE = Kernel(
    "decode",
    "mlx_kv_rvq",
    ("codes", "norm", "mean", "flips", "hadamard", "codebook", "params"),
    ("x",),
    template=_TEMPLATE,
    ensure_row_contiguous=False,
)


def choose(backend: str | None, dtype: mx.Dtype) -> Backend:
    """The backend for rows of a dtype; where "auto" finds no kernel for them, the reference.

    Raises:
        UnavailableBackendError: the backend asked for cannot run here, or its kernels do not take such rows.
    """
    chosen = resolve_backend(backend)
    if chosen == "reference" or dtype in DTYPES:
        return chosen
    reason = f"expected float32, float16 or bfloat16, got {dtype}"
    if (backend or os.environ.get(ENVIRONMENT_VARIABLE) or "auto") != "auto":
        raise UnavailableBackendError(f"[rvq] backend {chosen!r} was asked for and has no kernel: {reason}")
    _log_once(reason)
    return "reference"


def encode(
    x: mx.array,
    bits: int,
    stages: int,
    seed: int,
    unbiased: bool,
    center: bool,
    skip: Sequence[int],
    backend: Backend,
) -> Encoded:
    """Launch `encode`; four threads take a row."""
    return _encoder(x.shape, x.dtype, bits, stages, seed, unbiased, center, tuple(skip), backend)(x)


@launches
def _encoder(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    bits: int,
    stages: int,
    seed: int,
    unbiased: bool,
    center: bool,
    skip: tuple[int, ...],
    backend: Backend,
) -> Callable[[mx.array], Encoded]:
    *batch, rows, dim = shape
    sequences, heads, _, _ = four = _four_axes(shape)
    threads = 4 * BLOCK if center else _THREADS
    # Of arrays with fewer axes, the first is a head's or a row's here; skip is given only where it is the batch's.
    rest = [
        _signs(dim, seed, dtype),
        *tables(dim, seed, bits, stages, False)[1:],
        _params((rows, *(skip or [0] * sequences))),
    ]
    mean_shape = (*batch, rows // BLOCK, dim) if center else (CONSTANT_BELOW,)
    launch = ENCODE.prepare(
        inputs=[(dtype, four), *((array.dtype, array.shape) for array in rest)],
        template={**_template(dtype, dim, bits, stages, center), "UNBIASED": unbiased},
        grid=(-(-4 * rows // threads) * threads, heads, sequences),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*batch, rows, stages * words_of(dim, bits)), (*batch, rows, 1), mean_shape],
        output_dtypes=[mx.uint32, mx.bfloat16, dtype],
        # 64 registers a thread, where they are about enough. Threadgroups of centred rows are large: with one alone on
        # a core, nothing is read while it computes.
        threadgroups_per_core=1024 // threads if stages == 1 and dim <= 128 and (center or dim in (64, 128)) else None,
        backend=backend,
    )

    def encoded(x: mx.array) -> Encoded:
        codes, norm, mean = launch([x.reshape(four), *rest])
        return Encoded(codes, norm, mean if center else None)

    return encoded


def decode(
    encoded: Encoded, bits: int, stages: int, seed: int, dim: int, dtype: mx.Dtype, backend: Backend
) -> mx.array:
    """Launch `decode`; four threads take a row."""
    *batch, rows, _ = encoded.codes.shape
    center = encoded.mean is not None
    codes, norm, mean = (
        a.reshape(_four_axes(a.shape)) for a in (encoded.codes, encoded.norm, _some(encoded.mean, dtype))
    )
    heads, sequences = codes.shape[1], codes.shape[0]
    return DECODE(
        inputs=[_roomy(codes), _roomy(norm), mean, *tables(dim, seed, bits, stages, True), _params((rows,))],
        template=_template(dtype, dim, bits, stages, center),
        grid=(-(-4 * rows // _THREADS) * _THREADS, heads, sequences),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*batch, rows, dim)],
        output_dtypes=[dtype],
        backend=backend,
    )[0]


def _template(dtype: mx.Dtype, dim: int, bits: int, stages: int, center: bool) -> dict[str, bool | int | mx.Dtype]:
    scale = struct.unpack("i", struct.pack("f", dim**-0.5))[0]
    odd = odd_part(dim)
    return {"T": dtype, "DIM": dim, "ODD": odd, "BITS": bits, "STAGES": stages, "CENTER": center, "SCALE": scale}


@cache
def tables(dim: int, seed: int, bits: int, stages: int, transposed: bool) -> tuple[mx.array, mx.array, mx.array]:
    """The signs as bits, the odd part's matrix as bits, and the codebooks, then the borders between their levels."""
    flips = _words([i for i, minus in enumerate(negative(dim, seed)) if minus])
    rows = negative_columns(dim)
    if transposed:
        rows = tuple(sum((row >> b & 1) << i for i, row in enumerate(rows)) for b in range(len(rows)))
    books = codebooks(dim, bits, stages)
    levels = [*chain.from_iterable(books), *chain.from_iterable((*midpoints(book), 0.0) for book in books)]
    return flips, numbers(_filled(rows), mx.uint32), numbers(_filled(levels), mx.float32)


@cache
def _signs(dim: int, seed: int, dtype: mx.Dtype) -> mx.array:
    """The bits that change in the words of a row, as it lies in memory."""
    width = 8 * dtype.size
    top = [1 << width - 1 if minus else 0 for minus in negative(dim, seed)]
    in_word = 32 // width
    words = [sum(top[i + j] << width * j for j in range(in_word)) for i in range(0, dim, in_word)]
    return numbers(tuple(words), mx.uint32)


def _words(bits: Sequence[int]) -> mx.array:
    return numbers(tuple(sum(1 << bit % 32 for bit in bits if bit // 32 == word) for word in range(8)), mx.uint32)


def _params(values: tuple[int, ...]) -> mx.array:
    return numbers(_filled(values), mx.int32)


def _filled(values: Sequence[float]) -> tuple[float, ...]:
    """The numbers of an input, 8 or more: fewer would lie in Metal's constant memory, with other pointers."""
    return (*values, *[0] * (CONSTANT_BELOW - len(values)))


def _roomy(x: mx.array) -> mx.array:
    """An array [batch, heads, rows, width] with more rows, if it has fewer than 8 elements."""
    return x if x.size >= CONSTANT_BELOW else mx.pad(x, [(0, 0), (0, 0), (0, CONSTANT_BELOW), (0, 0)])


def _some(mean: mx.array | None, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((CONSTANT_BELOW, 1), dtype) if mean is None else mean


def _four_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as [batch, heads, rows, channels]."""
    return shape if len(shape) == 4 else (math.prod(shape[:-3]), *(1,) * (3 - len(shape)), *shape[-3:])


@cache
def _log_once(reason: str) -> None:
    _log.warning("RVQ runs as plain MLX ops: its kernels do not take this. %s", reason)
