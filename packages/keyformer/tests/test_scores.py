"""Keyformer's noise and selection."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.testing.accumulation_checks import kept
from mlx_kv.testing.driving import feed, new_cache, random_tokens
from mlx_kv_kernels.testing import array, check_case
from mlx_kv_keyformer import noise, reference, scores, select


def test_noise_is_the_reference_s():
    positions = mx.array([[5, 900, 3, 0], [70000, 2, 3, 1 << 30]])
    for seed, layer in ((0, 0), (4294967295, 31)):
        expected = [[reference.noise(seed, layer, h, p) for p in positions[h // 2].tolist()] for h in range(4)]
        # the logarithm of a logarithm in float32
        np.testing.assert_allclose(noise(positions, 4, seed, layer), expected, rtol=1e-5, atol=1e-6)


def test_noise_refuses():
    with pytest.raises(ValueError, match=r"\[keyformer\] expected query_heads a multiple of 2, got 3"):
        noise(mx.zeros((2, 5), mx.int32), 3, 0, 0)


def test_select():
    given = array("ties", 0, (2, 3, 50))
    for budget, recent in ((1, 0), (15, 5), (7, 7), (50, 5)):
        check_case(select, {"scores": given, "budget": budget, "recent": recent})
        assert select(given, budget, recent).tolist() == reference.select(given, budget, recent).tolist()


@pytest.mark.parametrize(
    ("budget", "recent", "message"),
    [(0, 0, "budget from 1 to 50 rows, got 0"), (51, 0, "budget from 1 to 50 rows, got 51"), (5, 6, "recent from 0")],
)
def test_select_refuses(budget, recent, message):
    with pytest.raises(ValueError, match=rf"\[keyformer\] expected {message}"):
        select(mx.zeros((1, 1, 50)), budget, recent)


def test_scores_refuse():
    with pytest.raises(ValueError, match=r"\[keyformer\] expected tau above 0, got 0"):
        scores(mx.zeros((1, 1, 1, 4)), mx.zeros(4), 0)


def generation(options):
    cache = new_cache(f"keyformer(budget=32{options})")
    feed(cache, random_tokens(0, 150), [149, 1])
    feed(cache, random_tokens(1, 20), [1] * 20)
    return kept(cache)


def test_the_seed_decides():
    assert generation(", seed=1") == generation(", seed=1")
    assert generation(", seed=1") != generation(", seed=2")
    assert generation(", noise=0, seed=1") == generation(", noise=0, seed=2")


def test_the_temperature_matters():
    assert generation(", tau_end=2.0, steps=1") != generation(", tau_end=9.0, steps=1")
