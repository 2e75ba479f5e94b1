"""200 random steps of Keyformer against a float64 simulator that stores every row and drops rows by definition."""

from functools import cache

import pytest

from mlx_kv.spec import Spec
from mlx_kv.testing.accumulation import Simulator, compare_walk
from mlx_kv_kernels.testing import legs
from mlx_kv_keyformer import reference

LAYER = 3  # of the walk
WALKS = [
    {"spec": "keyformer(budget=32, noise=0)", "group": 1, "batch": 1},
    {"spec": "keyformer(budget=32, seed=7)", "group": 2, "batch": 2},
    {"spec": "keyformer(budget=41, recent=0.02, tau_init=0.5, tau_end=3.0, steps=16)", "group": 3, "sinks": True},
    {"spec": "keyformer(budget=20, recent=0.9, noise=0.5)", "group": 4, "batch": 2},
    {"spec": "keyformer(seed=4294967295)", "group": 2, "batch": 2},
    {"spec": "keyformer(budget=24, every_chunk=True)", "group": 2, "batch": 1},
]


def simulator(spec):
    """The simulator of a spec, for a number of KV heads."""
    c = Spec.parse(spec).policy

    def rows(tokens):
        if tokens == 0 and isinstance(c.budget, float):
            return None
        budget = int(tokens * c.budget) if isinstance(c.budget, float) else c.budget
        return budget, int(budget * c.recent)

    @cache
    def noise(head, position):
        return c.noise * reference.noise(c.seed, LAYER, head, position)

    def temperature(step):
        return min(c.tau_init + step * (c.tau_end - c.tau_init) / c.steps, c.tau_end)

    return lambda kv_heads: Simulator(kv_heads, rows, temperature, noise, c.every_chunk)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk["spec"])
def test_the_rows_kept_are_the_simulator_s_at_every_step(walk):
    decisions = compare_walk(simulate=simulator(walk["spec"]), **walk)
    assert decisions.compared >= 400
    assert decisions.near <= 0.01 * decisions.compared


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("leg", legs(), ids=str)
def test_kernels_keep_the_simulator_s_rows(monkeypatch, leg, batch):
    """A step's launches, attention's among them."""
    monkeypatch.setenv("MLX_KV_BACKEND", leg.backend)
    with leg.active():
        compare_walk(
            "keyformer(budget=32, seed=7)", simulator("keyformer(budget=32, seed=7)"), batch=batch, steps=6, dim=64
        )
