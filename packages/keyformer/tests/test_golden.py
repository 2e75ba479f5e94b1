"""Worked examples of Keyformer."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv_keyformer import Keyformer, reference, scores, temperature


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [(10, 0.6, (6, 1)), (128, 0.6, (76, 22)), (1920, 0.5, (960, 288))],
)
def test_budgets(tokens, budget, expected):
    """Both products are cut to whole numbers."""
    assert Keyformer(budget=budget, recent=0.3).kept(tokens) == expected


def test_temperatures():
    assert [temperature(t, 4, 1.0, 2.0) for t in range(6)] == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    assert [Keyformer().temperature(t) for t in (0, 128, 256, 9999)] == [1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("op", [scores, reference.scores])
@pytest.mark.parametrize(("tau", "expected"), [(1.0, [1 / 30, 4 / 30, 9 / 30, 16 / 30]), (2.0, [0.1, 0.2, 0.3, 0.4])])
def test_scores_without_noise(op, tau, expected):
    logits = mx.log(mx.array([1.0, 4.0, 9.0, 16.0]))
    got = op(logits[None, None, None], mx.zeros(4), tau)
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-6)  # float32


def test_scores_add_up_over_the_queries_that_see_a_row():
    logits = mx.log(mx.array([[1.0, 0.0], [1.0, 3.0]]))
    np.testing.assert_allclose(scores(logits[None, None], mx.zeros(2), 1.0)[0, 0], [1.25, 0.75], rtol=1e-6)


def test_noise_is_added_before_the_temperature():
    logits, noise = mx.log(mx.array([[[[1.0, 4.0]]]])), mx.log(mx.array([4.0, 1.0]))
    np.testing.assert_allclose(scores(logits, noise, 3.0)[0, 0], [0.5, 0.5], rtol=1e-6)
