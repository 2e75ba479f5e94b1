"""Random walks over RVQ caches, against every row seen and the rows that the reference encodes."""

import mlx.core as mx
import numpy as np

from mlx_kv.testing.machine import cache_machine
from mlx_kv_rvq import Rvq, reference

CONFIGS = {
    "rvq(residual=32)": Rvq(residual=32),
    "rvq(residual=0, center=False, key_bits=3, stages=2)": Rvq(residual=0, center=False, key_bits=3, stages=2),
    "rvq(residual=16, sinks=31, value_bits=1, rollback=40, unbiased=False)": Rvq(
        residual=16, sinks=31, value_bits=1, rollback=40, unbiased=False
    ),
}


def oracle(config):
    """What the rows of one sequence read back as: the reference's encoding of those the rule says are packed."""

    def settled(keys, values):
        due = max(0, keys.shape[1] - config.rollback - config.residual)
        of_keys = 128 if config.center else 32
        return (
            _read(keys, due // of_keys * of_keys, config.key_bits, config, config.center),
            _read(values, due // 32 * 32, config.value_bits, config, False),
        )

    return settled


def _read(rows, packed, bits, config, center):
    if not packed:
        return rows
    encoded = reference.encode(
        mx.array(rows[None, :, :packed]),
        bits,
        config.stages,
        config.seed,
        unbiased=config.has_unbiased_norms,
        center=center,
        skip=[config.sinks] if center else (),
    )
    read = rows.copy()
    decoded = np.array(reference.decode(encoded, bits, config.stages, config.seed, rows.shape[2], mx.float32))[0]
    read[:, config.sinks : packed] = decoded[:, config.sinks :]
    return read


TestCaches = cache_machine({spec: oracle(config) for spec, config in CONFIGS.items()}, max_examples=40).TestCase
