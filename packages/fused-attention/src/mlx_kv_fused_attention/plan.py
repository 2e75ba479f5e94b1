"""Which kernel reads a layout, with which sizes: worked out once for each format, looked up at every step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from .kernel import NO_NOISE, NOISE_INPUTS, PACKAGE, ROW_NOISE, AttentionKernel
from .splits import SIMDGROUPS, Splits, choose_splits

if TYPE_CHECKING:
    from mlx_kv.layout import Format, Layout
    from mlx_kv.rows import Span

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LARGEST_GROUP = 16
FIRST_PLACE = 5  # a sequence's numbers before the layout's own: see sequence.metal
_LOG2_E = 1.4426950408889634
_HALF_TYPES = (mx.float16, mx.bfloat16)


@dataclass(frozen=True, eq=False)
class Plan:
    """A kernel, its template, and what it asks of a launch."""

    format: Format
    kernel: AttentionKernel
    template: dict[str, bool | int | mx.Dtype]
    tiled: bool
    threadgroups_per_core: int


def refusal(queries: mx.array, layout: Layout, sinks: mx.array | None) -> str | None:
    """Return why there is no kernel for this case; None if there is one."""
    sink_shape = None if sinks is None else sinks.shape
    return _refusal(layout.format, len(layout.extent.rows), queries.shape, queries.dtype, sink_shape)


@lru_cache(256)
def _refusal(
    format: Format, batch: int, shape: tuple[int, ...], dtype: mx.Dtype, sinks: tuple[int, ...] | None
) -> str | None:
    if len(shape) != 4 or shape[2] != 1:
        return f"expected queries [batch, query_heads, 1, key_dim], got {list(shape)}"
    if (shape[0], shape[3]) != (batch, format.key_dim):
        return f"expected queries [{batch}, query_heads, 1, {format.key_dim}], got {list(shape)}"
    if shape[1] % format.kv_heads or shape[1] > LARGEST_GROUP * format.kv_heads:
        return f"expected 1 to {LARGEST_GROUP} query heads per KV head, got {shape[1]} for {format.kv_heads}"
    for dim in (format.key_dim, format.value_dim):
        if dim not in HEAD_DIMS:
            return f"expected head_dim in {HEAD_DIMS}, got {dim}"
    if dtype not in (mx.float32, *_HALF_TYPES) or dtype != format.dtype:
        return f"expected queries of the rows' dtype, float32, float16 or bfloat16, got {dtype} and {format.dtype}"
    if sinks is not None and sinks != (shape[1],):
        return f"expected sinks [{shape[1]}], got {list(sinks)}"
    return None


@lru_cache(256)
def plan(format: Format, query_heads: int, scale: float, logits: bool, noisy: bool, backend: str) -> Plan:
    """Return the plan for a format that is not refused; with `noisy`, noise is added to the logits."""
    group = query_heads // format.kv_heads
    tiled = _in_tiles(format, group)
    template: dict[str, bool | int | mx.Dtype] = {
        "T": format.dtype,
        "GROUP": group,
        "KEY_DIM": format.key_dim,
        "VALUE_DIM": format.value_dim,
        "SIMDGROUPS": SIMDGROUPS,
        "PLACES": FIRST_PLACE + format.places,
        "SCALE": struct.unpack("i", struct.pack("f", scale * _LOG2_E))[0],
        "LOGITS": logits,
        "SUBNORMAL": backend != "metal",  # whether Apple's matrix units keep subnormal halves is not known
        **dict(format.constants),
    }
    per_core = 3 if format.tile_rows == 0 else 4  # few lanes share a dense row, which takes them more registers
    if tiled:
        heavy = max(format.key_dim * format.key_bits, format.value_dim * format.value_bits)  # bits a row: registers
        rows = 64 if heavy <= 256 and format.tile_rows % 64 == 0 else 32
        template |= {"TILE_ROWS": format.tile_rows, "ROWS": rows, "VALUE_GROUP": format.group_size}
        template |= {"KEY_BITS": format.key_bits, "VALUE_BITS": format.value_bits}
        # With registers for all that is in flight, which most tiles would spill in three.
        per_core = 3 if rows == 32 and heavy <= 256 else 2
        template["VALUES_AHEAD"] = per_core == 2  # where three run, there are no registers for the next tile's values
    kernel = AttentionKernel(
        "attend_tiles" if tiled else "attend_rows",
        PACKAGE,
        ("queries", "places", *format.inputs, *(NOISE_INPUTS if noisy else ())),
        ("partial", "logits") if logits else ("partial",),
        template=tuple(template),
        layout_sources=format.sources,
        noise_sources=ROW_NOISE if noisy else NO_NOISE,
    )
    return Plan(format, kernel, template, tiled, per_core)


def _in_tiles(format: Format, group: int) -> bool:
    """Tell whether the matrix kernel reads the format: half types, and codes that fill the fragments of a lane."""
    return (
        format.dtype in _HALF_TYPES
        and format.tile_rows % 32 == 0 < format.tile_rows
        and group <= 8
        and format.key_bits in (2, 4, 8)
        and format.value_bits in (2, 4, 8)
        and format.key_dim * format.key_bits % 128 == 0
        and format.value_dim * format.value_bits % 128 == 0
    )


def splits_of(
    format: Format, rows: Sequence[int], tiles: Sequence[Span], threadgroups_per_core: int, fixed: int | None
) -> Splits:
    """Choose the splits of a layout, of whose sequences the rows tiles[b] are read in tiles."""
    outside = max(n - (last - first) for n, (first, last) in zip(rows, tiles, strict=True))
    tile_rows = max(last - first for first, last in tiles)
    heads = format.kv_heads * len(rows)
    return choose_splits(outside, tile_rows, format.tile_rows, heads, threadgroups_per_core, fixed)
