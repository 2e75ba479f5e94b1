"""A single token's turn in a packed store of one sequence: what decoding does in every layer, at every step.

It does what PackedSide.settle and append do for chunks and batches, in one launch beside the packing of what is due: on
a fast device the host decides how long a step takes, and every buffer written to costs it as much as a kernel. Packed
rows wait in small buffers, `staged`, to be written behind the others STAGED at a time. What a turn does depends on
numbers alone, which the layers of a model usually agree in: it is worked out once for all of them. Where kernels run is
asked then, and not at every token, since asking is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_kv_kernels import Backend, resolve_backend
from mlx_kv_kernels.launch import Launch, launches
from mlx_kv_kernels.put import Spot, put_each, spots_array

if TYPE_CHECKING:
    from .layout import Extent, Format
    from .packing import PackedSide

STAGED = 32
"""Rows of a staged buffer."""
_LARGEST_TAIL = 1 << 20  # bytes: larger ones are written to where they lie, which costs a launch but no copy

RowPacker = Callable[[mx.array], Sequence[mx.array]]
"""Packs rows [1, heads, 1, dim], each on its own: an array for each of a side's coded buffers."""


@dataclass(eq=False)
class Turn:
    """What a turn does to stores in one state: the same object for each of them."""

    like: tuple[object, ...]
    """What the token's rows are like; see `likeness`."""
    dues: tuple[int, ...]
    """Rows of each side to be packed, 0 or 1."""
    after: tuple[int, ...]
    """Rows of the store, and staged ones of each side, after the turn."""
    spots: mx.array
    launch: Launch
    described: tuple[Format, Extent] | None = None
    """What the store then says of itself in its layout."""
    following: Turn | None = None
    """The turn after this one."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Become None in a copy, which works it out anew."""
        return type(None), ()

    def take(self, sides: Sequence[PackedSide], rows: Sequence[mx.array]) -> None:
        """Append rows [1, heads, 1, dim] to the sides' tails; where one is due, pack the tail's first and drop it."""
        arrays = [self.spots]
        for side, due, row in zip(sides, self.dues, rows, strict=True):
            arrays += (row, side.tail.at_front())
            if due:
                arrays += side.staged or _blank(side)
        written = iter(self.launch(arrays))
        for side, due in zip(sides, self.dues, strict=True):
            side.tail.restart(next(written), side.tail.ends[0] - due + 1)
            if due:
                side.staged = [next(written) for _ in side.staged or side.coded()]
                side.staged_rows += 1


def likeness(keys: mx.array, values: mx.array) -> tuple[object, ...]:
    """Return what a token's rows have in common with those that take the same turn.

    The thread among it, whose stream the array of spots belongs to.
    """
    return keys.dtype, keys.shape, values.dtype, values.shape, get_ident()


def find_turn(
    sides: Sequence[PackedSide],
    dues: Sequence[int],
    rows: Sequence[mx.array],
    before: tuple[int, ...],
    like: tuple[object, ...],
    kind: tuple[object, ...],
) -> Turn | None:
    """Return the turn of a store; None if that is more than a turn, or spares no launch.

    Args:
        sides: keys and values.
        dues: rows of each that are to be packed.
        rows: the token's.
        before: rows of the store, and staged ones of each side.
        like: the token's `likeness`.
        kind: what else tells the store from others, beside its sides' signatures.
    """
    backend = resolve_backend()
    if backend == "reference" or not all(map(_can_take, sides, dues, rows)):
        return None
    spots: list[Spot] = []
    for side, due in zip(sides, dues, strict=True):
        tail = side.tail.at_front()
        spots.append(Spot(tail.shape[2], shift=due, place=side.tail.ends[0] - due))
        spots += [Spot(STAGED, shift=0, place=side.staged_rows)] * (due * len(side.coded()))
    packers = tuple([side.row_packer if due else None for side, due in zip(sides, dues, strict=True)])
    after = before[0] + 1, *[staged + due for staged, due in zip(before[1:], dues, strict=True)]
    state = kind, *[(side.signature, side.row_packer) for side in sides]
    return _turn(state, like, tuple(dues), after, tuple(spots), packers, backend)


def _can_take(side: PackedSide, due: int, row: mx.array) -> bool:
    """Tell whether a row [1, heads, 1, dim] can be appended where so many rows are due to be packed.

    One row may be, beyond the exact ones, where rows are packed each on its own and there is room to stage it.
    """
    tail = side.tail.data
    if tail is None or tail.nbytes > _LARGEST_TAIL or row.dtype != tail.dtype:
        return False
    if row.shape != (1, tail.shape[1], 1, tail.shape[3]):
        return False
    if due != 1:
        return due == 0
    # Once the exact rows have been written, so have the buffers that say what staged ones look like.
    exact_written = side.codes.lengths[0] >= max(side.sinks, 1)
    return exact_written and side.staged_rows < STAGED and side.row_packer is not None


@launches
def _turn(
    state: tuple[object, ...],
    like: tuple[object, ...],
    dues: tuple[int, ...],
    after: tuple[int, ...],
    spots: tuple[Spot, ...],
    packers: tuple[RowPacker | None, ...],
    backend: Backend,
) -> Turn:
    """Return the turn of all stores in one state: their kind, and the numbers of their buffers."""
    return Turn(like, dues, after, spots_array(spots), _launch(packers, backend))


@launches  # the layers of a model usually agree
def _launch(packers: tuple[RowPacker | None, ...], backend: Backend) -> Launch:
    """Return the launch for sides of which those with a packer pack their tail's first row.

    It takes the spots, then of each side the new row, the tail and, with a packer, the staged buffers; it returns the
    tail and those buffers of each side.
    """

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        given = iter(arrays[1:])
        puts: list[tuple[mx.array, mx.array]] = []
        for packer in packers:
            row, tail = next(given), next(given)
            puts.append((tail, row))
            if packer:
                puts += [(next(given), packed) for packed in packer(tail[:, :, :1])]
        return put_each(puts, arrays[0], backend)

    return Launch(launch, compiles=backend != "emulator")


def _blank(side: PackedSide) -> list[mx.array]:
    data = [cast("mx.array", buffer.data) for buffer, _ in side.coded()]
    return [_blank_buffer(rows.shape[1], rows.shape[3], rows.dtype) for rows in data]


@cache
def _blank_buffer(heads: int, width: int, dtype: mx.Dtype) -> mx.array:
    blank = mx.zeros((1, heads, STAGED, width), dtype)
    mx.eval(blank)
    return blank
