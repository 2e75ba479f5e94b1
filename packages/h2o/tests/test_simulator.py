"""200 random steps of H2O against a float64 simulator that stores every row and drops rows by definition."""

import pytest

from mlx_kv.spec import Spec
from mlx_kv.testing.accumulation import Simulator, compare_walk
from mlx_kv_kernels.testing import legs

WALKS = [
    {"spec": "h2o(heavy=20, recent=12)", "group": 1, "batch": 1},
    {"spec": "h2o(heavy=1, recent=40)", "group": 2, "batch": 2},
    {"spec": "h2o(heavy=40, recent=1)", "group": 3, "batch": 1, "sinks": True},
    {"spec": "h2o(heavy=12, recent=20)", "group": 4, "batch": 2},
    {"spec": "h2o(heavy=0.2, recent=0.1)", "group": 2, "batch": 2},
    {"spec": "h2o(heavy=16, recent=8, every_chunk=True)", "group": 2, "batch": 1},
]


def simulator(spec):
    """The simulator of a spec, for a number of KV heads."""
    config = Spec.parse(spec).policy

    def rows(tokens):
        if tokens == 0 and isinstance(config.heavy, float):
            return None
        heavy, recent = (n if isinstance(n, int) else int(n * tokens) for n in (config.heavy, config.recent))
        return heavy + recent, recent

    return lambda kv_heads: Simulator(kv_heads, rows, every_chunk=config.every_chunk)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: f"{walk['spec']} group {walk['group']} batch {walk['batch']}")
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
        compare_walk("h2o(heavy=20, recent=12)", simulator("h2o(heavy=20, recent=12)"), batch=batch, steps=6, dim=64)
