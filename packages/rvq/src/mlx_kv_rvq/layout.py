"""The RVQ store's arrays, described for fused attention, which reads them in the rotated basis."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.layout import Format, Layout, extent, input_array

from .codec import RotatedCodec
from .config import BLOCK, Rvq
from .launch import tables
from .rotation import odd_part

if TYPE_CHECKING:
    from .packed import PackedRows
    from .store import RvqStore

_PACKED = ("codes", "norm", "mean", "exact")
_TABLES = ("flips", "hadamard", "levels")
_ROTATION = ("mlx_kv_rvq", "kernels/rotation.metal")
_UNCENTERED_TILE = 64


def describe(store: RvqStore) -> Layout | None:
    """Return what kernels/rvq_rows.metal reads but for the tails, the last two.

    None if nothing is packed yet, or codebooks are trained.
    """
    keys, values, config, rows = store.keys, store.values, store.config, store.lengths
    if keys.codes.data is None or values.codes.data is None or not isinstance(config, Rvq):
        return None
    format = rvq_format(config, keys.codes.data.shape[1], keys.dim, values.dim, keys.dtype)
    # Both sides are packed from the first tile that holds no exact row to the last whole one of keys.
    size = format.tile_rows
    first = -(-config.sinks // size) * size if size else 0
    packed = [min(pair) for pair in zip(keys.codes.lengths, values.codes.lengths, strict=True)]
    places = tuple([_place(keys, b, n) + _place(values, b, n) for b, n in enumerate(rows)])
    tiles = tuple([(first, max(first, n // size * size)) if size else (0, 0) for n in packed])
    return Layout(format, _arrays(keys) + _arrays(values), extent(tuple(rows), places, tiles), store.dense)


@cache
def rvq_format(config: Rvq, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Format:
    """Return the format of a configuration's rows."""
    constants = {
        "KEY_ODD": odd_part(key_dim),
        "VALUE_ODD": odd_part(value_dim),
        "CODE_BITS_OF_KEYS": config.key_bits,
        "CODE_BITS_OF_VALUES": config.value_bits,
        "STAGES": config.stages,
        "CENTER": int(config.center),
    }
    sides = ("key", "value")
    in_tiles = config.stages == 1 and {config.key_bits, config.value_bits} <= {2, 4}
    return Format(
        "rvq",
        (_ROTATION, ("mlx_kv_rvq", "kernels/rvq_rows.metal")),
        kv_heads,
        key_dim,
        value_dim,
        dtype,
        inputs=(
            *[f"{side}_{name}" for side in sides for name in (*_PACKED, *_TABLES)],
            *[f"{side}_tail" for side in sides],
        ),
        places=24,
        constants=tuple(constants.items()),
        tile_rows=(BLOCK if config.center else _UNCENTERED_TILE) if in_tiles else 0,
        key_bits=config.key_bits,
        value_bits=config.value_bits,
        group_size=value_dim,
        basis_sources=(_ROTATION, ("mlx_kv_rvq", "kernels/rotated_basis.metal")),
        basis_inputs=("value_flips", "value_hadamard"),
    )


def _arrays(side: PackedRows) -> tuple[mx.array, ...]:
    dtypes = (mx.uint32, mx.bfloat16, side.dtype, side.dtype)
    buffers = (side.codes, side.norm, side.mean, side.exact)
    held = [input_array(buffer.data, dtype) for buffer, dtype in zip(buffers, dtypes, strict=True)]
    codec = side.codec
    if not isinstance(codec, RotatedCodec):
        raise TypeError(f"[rvq] expected rows encoded by rotation, got {type(codec).__name__}")
    return (*held, *tables(side.dim, codec.seed, codec.bits, codec.stages, False))


def _place(side: PackedRows, sequence: int, rows: int) -> tuple[int, ...]:
    """Return a sequence's numbers on one side, as the Metal text counts them."""
    buffers = (side.exact, side.codes, side.norm, side.mean, side.tail)
    begins = [buffer.begins[sequence] if buffer.begins else 0 for buffer in buffers[:-1]]
    return (
        side.exact.lengths[sequence],
        side.codes.lengths[sequence],
        *begins,
        side.tail.ends[sequence] - rows,
        *(0 if buffer.data is None else buffer.data.shape[2] for buffer in buffers),
    )
