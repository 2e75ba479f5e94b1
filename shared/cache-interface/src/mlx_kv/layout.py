"""How a store describes the arrays it holds, so that attention can read them without unpacking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from .rows import Span

if TYPE_CHECKING:
    from jaxtyping import Float

    Dense = tuple[
        Float[mx.array, "batch kv_heads rows key_dim"],
        Float[mx.array, "batch kv_heads rows value_dim"],
    ]


@dataclass(frozen=True, eq=False, slots=True)
class Format:
    """What all layouts of a store have in common, and the Metal text that reads them.

    The text, a `.metal` file in two parts as mlx_kv_kernels reads them after any that hold but helpers, defines in its
    body two objects, `keys` and `values`; mlx-kv-fused-attention's README lists the functions that they need.
    Formats are compared by identity: kernels are looked up by them at every step, so a store makes its format once.
    """

    name: str
    """Names the layout in kernels and messages, such as "kivi"."""
    sources: tuple[tuple[str, str], ...]
    """Of each file of the Metal text, the package that carries it and its path there."""
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    """Of the rows in full precision: the model's."""
    inputs: tuple[str, ...]
    """The names by which the text knows the layout's arrays."""
    places: int
    """Numbers of each sequence, which the text finds as `place[0]`, `place[1]`, ..."""
    constants: tuple[tuple[str, int], ...] = ()
    """Compile-time numbers, by the names that the text uses."""
    tile_rows: int = 0
    """Rows of a group that share what `keys.fold` yields; 0 where the text has no `fragment` functions."""
    key_bits: int = 0
    """Bits of a key's code in tiles; codes lie side by side in 32-bit words, from the low bit."""
    value_bits: int = 0
    """Bits of a value's code in tiles."""
    group_size: int = 0
    """Channels that share a value's scale in tiles."""
    basis_sources: tuple[tuple[str, str], ...] = ()
    """Where values are held in another basis: the files of the text that brings an output out of it."""
    basis_inputs: tuple[str, ...] = ()
    """Those of `inputs` that it reads."""


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """Which rows a layout's sequences have, and where: numbers on the host, made by `extent`."""

    rows: tuple[int, ...]
    """Rows of each sequence of the batch."""
    places: tuple[tuple[int, ...], ...]
    """Numbers of each sequence, as the format's text knows them."""
    tiles: tuple[Span, ...] = ()
    """Of each sequence, the rows first..last-1 that may be read in tiles; both are multiples of `format.tile_rows`."""


@lru_cache(256)
def extent(rows: tuple[int, ...], places: tuple[tuple[int, ...], ...], tiles: tuple[Span, ...] = ()) -> Extent:
    """Return the extent of these numbers, the same object for the same ones: launches are looked up by it."""
    return Extent(rows, places, tiles)


@lru_cache(256)
def next_extent(before: Extent) -> Extent:
    """Return the extent with a row more in each sequence, at the same places and with the same tiles."""
    return extent(tuple([n + 1 for n in before.rows]), before.places, before.tiles)


class Layout(NamedTuple):
    """The rows of one layer as a store holds them now."""

    format: Format
    arrays: tuple[mx.array, ...]
    """In the order of `format.inputs`; each has 8 elements or more."""
    extent: Extent
    dense: Callable[[], Dense]
    """Returns the store's `dense()`: keys and values uncompressed, each sequence from row 0, as long as the longest."""


def input_array(data: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return a buffer's array as a kernel takes it: one that stands for nothing if there is none."""
    return _nothing(dtype) if data is None else data


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    return mx.zeros((1, 8, 1), dtype)  # of fewer than 8 elements, an input would be in another address space on Metal


@cache
def dense_format(kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Format:
    """Return the format of dense rows.

    Numbers of a sequence: first row and all rows of the keys' array, the same of the values', and the row from which on
    it is the newest, in arrays of its own; they are not read where there is none.
    """
    sources = (("mlx_kv", "kernels/dense_rows.metal"),)
    inputs = ("key_rows", "value_rows", "newest_key", "newest_value")
    return Format("dense", sources, kv_heads, key_dim, value_dim, dtype, inputs, places=5)


@cache
def exchanged_format(kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Format:
    """Return the format of dense rows of one sequence, of which the newest have not been written to their places yet.

    Numbers: those of dense rows.
    """
    sources = (("mlx_kv", "kernels/exchanged_rows.metal"),)
    inputs = ("key_rows", "value_rows", "newest_key", "newest_value", "overdue_rows", "taken")
    return Format("exchanged", sources, kv_heads, key_dim, value_dim, dtype, inputs, places=5)
