"""The KIVI store's arrays, described for fused attention."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.layout import Format, Layout, extent, input_array

from .config import Kivi

if TYPE_CHECKING:
    from .packed import PackedRows
    from .store import KiviStore

_PACKED = ("codes", "scale", "minimum", "exact")


def describe(store: KiviStore) -> Layout | None:
    """Return what kernels/kivi_rows.metal reads but for the tails, the last two; None if nothing is packed yet."""
    keys, values, config, rows = store.keys, store.values, store.config, store.lengths
    if keys.codes.data is None or keys.tail.data is None or values.tail.data is None:
        return None
    _, kv_heads, _, key_dim = keys.tail.data.shape
    format = kivi_format(config, kv_heads, key_dim, values.tail.data.shape[3], keys.tail.data.dtype)
    # Both sides are packed from the first group that holds no exact row to the last whole group of values.
    size = config.group_size
    first = -(-config.sinks // size) * size
    packed = values.codes.lengths
    # Values that were due before the newest row are read as they will be packed.
    newest = config.residual + config.rollback + 1
    exact = [newest if store.rows_wait else n - done for n, done in zip(rows, packed, strict=True)]
    places = [(*_place(keys, b, n), *_place(values, b, n), exact[b]) for b, n in enumerate(rows)]
    tiles = tuple([(first, max(first, done // size * size)) for done in packed])
    return Layout(
        format,
        _arrays(keys, format.dtype) + _arrays(values, format.dtype),
        extent(tuple(rows), tuple(places), tiles),
        store.dense,
    )


@cache
def kivi_format(config: Kivi, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Format:
    """Return the format of a configuration's rows."""
    constants = {
        "KEY_BITS": config.bits_of_keys,
        "VALUE_BITS": config.bits_of_values,
        "GROUP_SIZE": config.group_size,
        "SINKS": config.sinks,
    }
    sides = ("key", "value")
    return Format(
        "kivi",
        (("mlx_kv_kivi", "kernels/group_scale.metal"), ("mlx_kv_kivi", "kernels/kivi_rows.metal")),
        kv_heads,
        key_dim,
        value_dim,
        dtype,
        inputs=(*[f"{side}_{name}" for side in sides for name in _PACKED], *[f"{side}_tail" for side in sides]),
        places=21,
        constants=tuple(constants.items()),
        tile_rows=config.group_size,
        key_bits=config.bits_of_keys,
        value_bits=config.bits_of_values,
        group_size=config.group_size,
    )


def _arrays(side: PackedRows, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    return (
        input_array(side.codes.data, mx.uint32),
        input_array(side.scale.data, dtype),
        input_array(side.minimum.data, dtype),
        input_array(side.exact.data, dtype),
    )


def _place(side: PackedRows, sequence: int, rows: int) -> tuple[int, ...]:
    """Return a sequence's numbers on one side, as the Metal text counts them."""
    exact, codes, scale, tail = side.exact, side.codes, side.scale, side.tail
    return (
        exact.ends[sequence] - exact.begins[sequence],
        codes.ends[sequence] - codes.begins[sequence],
        exact.begins[sequence],
        codes.begins[sequence],
        scale.begins[sequence],
        tail.ends[sequence] - rows,
        *[buffer.limits[-1] for buffer in (exact, codes, scale, tail)],
    )
