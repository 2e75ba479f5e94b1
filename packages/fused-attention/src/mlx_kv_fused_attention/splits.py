"""How many splits share out the rows: from rows, heads, batch and the device's cores, and nothing else."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

SIMDGROUPS = 4  # of a threadgroup; each walks rows of its own
_ROWS = 4  # rows outside the tiles for a simdgroup, while there are threadgroups to spare: as many as it loads at once
_DENSE_ROWS = 8  # the same of rows that few lanes share
_LONG = 24  # a row on its own takes about as long as this many rows in tiles
_CORES_OF_A_SMALL_DEVICE = 32
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


class Splits(NamedTuple):
    """Splits of every KV head and sequence: over single rows, and over groups of rows in tiles."""

    rows: int
    tiles: int


@lru_cache(1024)
def choose_splits(
    outside: int, tile_rows: int, group_rows: int, heads: int, per_core: int, fixed: int | None = None
) -> Splits:
    """Share out as many threadgroups as run at once on the device.

    Args:
        outside: rows outside the tiles, of the longest sequence.
        tile_rows: rows in tiles, of the longest sequence.
        group_rows: rows of a group, which one simdgroup reads; 0 where rows are dense.
        heads: KV heads times sequences.
        per_core: threadgroups that run at once on a core.
        fixed: this many splits over the tiles (or over the rows, where there are no tiles) instead.
    """
    share = max(1, cores() * per_core // heads)
    rows = _ROWS if group_rows else _DENSE_ROWS
    for_rows = max(1, min(-(-outside // (rows * SIMDGROUPS)), share))
    if tile_rows == 0:
        return Splits(for_rows if fixed is None else fixed, 0)
    for_tiles = min(-(-tile_rows // (group_rows * SIMDGROUPS)), share) if fixed is None else fixed
    # The rows outside take no more splits than end about when the tiles' do.
    rows_of_split = max(_ROWS * SIMDGROUPS, tile_rows // (for_tiles * _LONG))
    for_rows = max(1, min(for_rows, -(-outside // rows_of_split), share // 2))
    return Splits(for_rows, for_tiles if fixed is not None else max(1, min(for_tiles, share - for_rows)))


@cache
def cores() -> int:
    """Cores (multiprocessors) of the device; of a small one where there is no way to ask."""
    if not mx.cuda.is_available():
        return _CORES_OF_A_SMALL_DEVICE
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, 0)
    if failed:
        raise RuntimeError(f"[fused_attention] the CUDA driver did not tell the multiprocessors: error {failed}")
    return count.value
