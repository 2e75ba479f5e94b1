"""Writing a row into each of several small buffers in one launch: the buffers' new contents are arrays of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from . import reference, source
from .backend import Backend, resolve_backend
from .kernel import CONSTANT_BELOW, Kernel
from .launch import Launch, launches
from .numbers import new_numbers

if TYPE_CHECKING:
    from jaxtyping import Int32, Shaped

_THREADS, _THREADS_OF_A_HEAD = 256, 1024


class Put(NamedTuple):
    """A buffer and the row that it gets."""

    buffer: Shaped[mx.array, "1 kv_heads rows width"]
    row: Shaped[mx.array, "1 kv_heads 1 width"]
    place: int
    """Where the row comes to stand."""
    shift: int = 0
    """How many rows go at the front before; what then stands behind the last one has no meaning."""


class Spot(NamedTuple):
    """Where a buffer gets its row, as the kernel is told."""

    rows: int
    """Of the buffer."""
    shift: int
    place: int


@dataclass(frozen=True)
class PutRows(Kernel):
    """put_rows for a number of buffers: gather_rows' helpers, its own, and its body once for each buffer."""

    @property
    def text(self) -> str:
        """The text for so many buffers."""
        chunks, _ = source.split(source.read(self.package, "kernels/gather_rows.metal"), "gather_rows.metal")
        own = source.repeated(super().text, len(self.output_names))
        return f'{chunks}#line 1 "{self.filename}"\n{own}'


@cache
def kernel_of(count: int) -> PutRows:
    """Return the kernel for so many buffers."""
    each = range(count)
    return PutRows(
        "put_rows",
        "mlx_kv_kernels",
        (*[f"{name}{i}" for i in each for name in ("buffer", "row")], "numbers"),
        tuple(f"out{i}" for i in each),
        template=tuple(f"{name}{i}" for i in each for name in ("WIDTH", "BYTES")),
    )


def put_rows(puts: Sequence[Put], *, backend: str | None = None) -> list[mx.array]:
    """Return each buffer with its row written and, before that, its rows moved down by `shift`.

    A copy of each buffer, in one launch for all: for buffers so small that launches cost more than copies. Where
    nothing else refers to a buffer, `buffer[:, :, place] = row` writes to it where it lies.

    Args:
        puts: buffers of the same heads, of any dtypes, and their rows of the same dtype and width.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Raises:
        ValueError: shapes, dtypes, places or shifts do not fit.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    for buffer, row, place, shift in puts:
        one, heads, rows, width = buffer.shape if buffer.ndim == 4 else (0, 0, 0, 0)
        if (
            one != 1
            or heads != puts[0].buffer.shape[1]
            or row.shape != (1, heads, 1, width)
            or row.dtype != buffer.dtype
        ):
            raise ValueError(
                f"[put_rows] expected buffers [1, kv_heads, rows, width] of the same heads and rows to fit, got "
                f"{buffer.dtype} {list(buffer.shape)} and {row.dtype} {list(row.shape)}"
            )
        if not (0 <= place < rows and 0 <= shift <= rows):
            raise ValueError(f"[put_rows] expected place and shift within {rows} rows, got {place} and {shift}")
    spots = spots_array([Spot(put.buffer.shape[2], put.shift, put.place) for put in puts])
    return put_each([put[:2] for put in puts], spots, resolve_backend(backend))


def spots_array(spots: Sequence[Spot]) -> Int32[mx.array, " numbers"]:
    """Return the array that `put_each` takes."""
    own = [n for spot in spots for n in spot]
    return new_numbers((*own, *[0] * (CONSTANT_BELOW - len(own))), mx.int32)


def put_each(
    puts: Sequence[tuple[mx.array, mx.array]], spots: Int32[mx.array, " numbers"], backend: Backend
) -> list[mx.array]:
    """Do what `put_rows` does, unchecked, for pairs of a buffer and its row, at spots that may be a compiled input."""
    if backend == "reference":
        return [reference.put_row(*put, spots[3 * i + 1], spots[3 * i + 2]) for i, put in enumerate(puts)]
    shapes, dtypes = tuple([buffer.shape for buffer, _ in puts]), tuple([buffer.dtype for buffer, _ in puts])
    return _launch(shapes, dtypes, backend)([*[_in_device_memory(array) for put in puts for array in put], spots])


@launches
def _launch(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[mx.Dtype, ...], backend: Backend) -> Launch:
    template: dict[str, int] = {}
    inputs: list[tuple[mx.Dtype, tuple[int, ...]]] = []
    for i, ((_, heads, _, width), dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        template |= {f"WIDTH{i}": width, f"BYTES{i}": gcd(16, width * dtype.size)}
        inputs += [(dtype, _in_memory(shape)) for shape in (shapes[i], (1, heads, 1, width))]
    return kernel_of(len(shapes)).prepare(
        inputs=[*inputs, (mx.int32, (max(3 * len(shapes), CONSTANT_BELOW),))],
        template=template,
        grid=(_THREADS_OF_A_HEAD, shapes[0][1], 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
        backend=backend,
    )


def _in_device_memory(x: mx.array) -> mx.array:
    """`x`, with zeros behind where Metal would hold so few elements in constant memory, which has other pointers."""
    return x if x.size >= CONSTANT_BELOW else mx.pad(x.reshape(-1), (0, CONSTANT_BELOW))


def _in_memory(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if prod(shape) >= CONSTANT_BELOW else (prod(shape) + CONSTANT_BELOW,)
