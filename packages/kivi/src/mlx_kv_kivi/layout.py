"""The KIVI store's arrays, described for fused attention."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv.layout import Extent, Format, extent, input_array
from mlx_kv.turn import STAGED

from .config import Kivi

if TYPE_CHECKING:
    from .packed import PackedRows
    from .store import KiviStore

_CODED = ("codes", "scale", "minimum")
_BUFFERS = (*_CODED, "exact", "tail")


def describe(store: KiviStore) -> tuple[Format, Extent] | None:
    """Return what kernels/kivi_rows.metal reads; None if nothing is packed yet."""
    keys, values, config, rows = store.keys, store.values, store.config, store.lengths
    keys_tail, values_tail = keys.tail.data, values.tail.data
    if keys.codes.data is None or keys_tail is None or values_tail is None:
        return None
    _, kv_heads, _, key_dim = keys_tail.shape
    # Both sides are packed from the first group that holds no exact row to the last whole group of values.
    size = config.group_size
    first = -(-config.sinks // size) * size
    return kivi_format(config, kv_heads, key_dim, values_tail.shape[3], keys_tail.dtype), extent(
        tuple(rows),
        tuple([(*_place(keys, b, n), *_place(values, b, n), values.staged_rows) for b, n in enumerate(rows)]),
        tuple([(first, max(first, packed // size * size)) for packed in values.codes.lengths]),
    )


def arrays(store: KiviStore, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Return the arrays of the layout."""
    return _arrays(store.keys, dtype) + _arrays(store.values, dtype) + _staged(store.values, dtype)


@cache
def kivi_format(config: Kivi, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Format:
    """Return the format of a configuration's rows."""
    constants = {
        "KEY_BITS": config.bits_of_keys,
        "VALUE_BITS": config.bits_of_values,
        "GROUP_SIZE": config.group_size,
        "STAGED": STAGED,
    }
    return Format(
        "kivi",
        ("mlx_kv_kivi", "kernels/kivi_rows.metal"),
        kv_heads,
        key_dim,
        value_dim,
        dtype,
        inputs=(
            *(f"{side}_{name}" for side in ("key", "value") for name in _BUFFERS),
            *(f"staged_{name}" for name in _CODED),
        ),
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
        input_array(side.tail.data, dtype),
    )


def _staged(side: PackedRows, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    dtypes = mx.uint32, dtype, dtype
    return tuple(side.staged) or tuple([input_array(None, each) for each in dtypes])


def _place(side: PackedRows, sequence: int, rows: int) -> tuple[int, ...]:
    """Return a sequence's numbers on one side, as the Metal text counts them."""
    exact, codes, scale, tail = side.exact, side.codes, side.scale, side.tail
    return (
        exact.ends[sequence] - exact.begins[sequence],
        codes.ends[sequence] - codes.begins[sequence] + side.staged_rows,
        exact.begins[sequence],
        codes.begins[sequence],
        scale.begins[sequence],
        tail.ends[sequence] - rows,
        *[buffer.limits[-1] for buffer in (exact, codes, scale, tail)],
    )
