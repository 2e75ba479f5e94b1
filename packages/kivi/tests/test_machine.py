"""Random walks over KIVI caches, against every row seen and the rows that the reference quantises."""

import mlx.core as mx
import numpy as np

from mlx_kv.testing.machine import cache_machine
from mlx_kv_kivi import Kivi, reference

CONFIGS = {
    "kivi(residual=32)": Kivi(residual=32),
    "kivi(residual=32, rollback=8)": Kivi(residual=32, rollback=8),
    "kivi(residual=64, sinks=0, bits=3)": Kivi(residual=64, sinks=0, bits=3),
    "kivi(residual=32, sinks=31, key_bits=8, value_bits=4, rollback=40)": Kivi(
        residual=32, sinks=31, key_bits=8, value_bits=4, rollback=40
    ),
}


def oracle(config):
    """What the rows of one sequence read back as: the reference's quantisation of those the rule says are packed."""

    def settled(keys, values):
        n, r, c = keys.shape[1], config.residual, config
        packed_keys, packed_values = r * (max(0, n - c.rollback) // r), max(0, n - c.rollback - r)
        if packed_keys:
            rows = keys[:, :packed_keys].copy()
            rows[:, : c.sinks] = rows[:, c.sinks : c.sinks + 1]  # sinks are no part of their groups
            codes = reference.quantize_keys(mx.array(rows), c.bits_of_keys, c.group_size)
            keys = _read(keys, reference.dequantize_keys(codes, c.bits_of_keys, c.group_size), c.sinks)
        if packed_values:
            codes = reference.quantize_values(mx.array(values[:, :packed_values]), c.bits_of_values, c.group_size)
            values = _read(values, reference.dequantize_values(codes, c.bits_of_values, c.group_size), c.sinks)
        return keys, values

    return settled


def _read(rows, dequantized, sinks):
    read = rows.copy()
    read[:, sinks : dequantized.shape[1]] = np.array(dequantized)[:, sinks:]
    return read


TestCaches = cache_machine({spec: oracle(config) for spec, config in CONFIGS.items()}).TestCase
