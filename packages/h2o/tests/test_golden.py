"""Worked examples of H2O, through the policy and through the functions."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import CompressedKVCache, DenseStore, Geometry
from mlx_kv.testing.accumulation_checks import kept, scores
from mlx_kv_h2o import H2O, column_sums, reference, select

ATTENTION = [
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.5, 0.5, 0.0, 0.0, 0.0],
    [0.25, 0.625, 0.125, 0.0, 0.0],
    [0.25, 0.125, 0.5, 0.125, 0.0],
    [0.125, 0.125, 0.375, 0.125, 0.25],
]
PROMPT = {0: 2.125, 3: 0.25, 4: 0.25}
STEPS = [  # attention to the positions held, and what is held with which score afterwards
    ({0: 0.125, 3: 0.625, 4: 0.125, 5: 0.125}, {0: 2.25, 4: 0.375, 5: 0.125}),
    ({0: 0.125, 4: 0.0, 5: 0.5, 6: 0.375}, {0: 2.375, 5: 0.625, 6: 0.375}),
    ({0: 0.0, 5: 0.125, 6: 0.25, 7: 0.625}, {0: 2.375, 6: 0.625, 7: 0.625}),
]


def inputs(attention):
    """Queries and keys of 16 channels whose logits, with a scale of 1, are the logarithm of an attention matrix."""
    size = len(attention)
    logits = np.log(np.maximum(np.array(attention), 1e-30)).astype(np.float32)
    keys = np.zeros((1, 1, size, 16), np.float32)
    keys[0, 0, :, :size] = logits.T
    return mx.eye(size, 16)[None, None], mx.array(keys)


def held(cache):
    [[own]] = kept(cache)
    summed = scores(cache)[0][0]
    return {position: pytest.approx(summed[position], abs=1e-6) for position in own}  # float32


def test_a_prompt_and_three_steps():
    """The new token's own attention is in its score; positions go on counting from 5, the tokens seen."""
    attention = np.zeros((8, 8))
    attention[:5, :5] = ATTENTION
    for i, (given, _) in enumerate(STEPS):
        attention[5 + i, list(given)] = list(given.values())
    queries, keys = inputs(attention)
    cache = CompressedKVCache(H2O(heavy=1, recent=2).create(Geometry(0, 1, 1, 16, 16)), DenseStore())
    expected = [None, PROMPT, *(after for _, after in STEPS)]
    for (first, last), right in zip([(0, 4), (4, 5), (5, 6), (6, 7), (7, 8)], expected, strict=True):
        chunk = keys[:, :, first:last]
        cache.attend(
            queries[:, :, first:last], *cache.update_and_fetch(chunk, chunk), 1.0, cache.make_mask(last - first)
        )
        if right is not None:
            assert held(cache) == right
    assert cache.offset == 8


COLUMN_SUMS = [column_sums, reference.column_sums]


@pytest.mark.parametrize("op", COLUMN_SUMS)
def test_scores_of_the_prompt(op):
    np.testing.assert_allclose(op(*inputs(ATTENTION), 1.0)[0, 0], [2.125, 1.375, 1.0, 0.25, 0.25], rtol=1e-6)


@pytest.mark.parametrize("op", COLUMN_SUMS)
def test_scores_are_raw_sums(op):
    """Divided by the number of queries that could see a row, they would keep row 1 instead of row 0."""
    attention = [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.125, 0.875, 0.0, 0.0, 0.0],
        [0.125, 0.125, 0.75, 0.0, 0.0],
        [0.125, 0.125, 0.75, 0.0, 0.0],
        [0.0, 0.125, 0.75, 0.0, 0.125],
    ]
    summed = op(*inputs(attention), 1.0)
    np.testing.assert_allclose(summed[0, 0], [1.375, 1.25, 2.25, 0.0, 0.125], atol=1e-6)
    for choose in (select, reference.select):
        assert choose(summed, 2, 1).tolist() == [[[0, 2, 4]]]


@pytest.mark.parametrize("choose", [select, reference.select])
def test_the_row_before_the_window_can_stay(choose):
    """The official mask is off by one there, and always loses it."""
    assert choose(mx.array([[[1.0, 2.0, 9.0, 0.0, 0.0]]]), 1, 2).tolist() == [[[2, 3, 4]]]


@pytest.mark.parametrize("choose", [select, reference.select])
def test_ties_go_to_the_lowest_row(choose):
    assert choose(mx.array([[[1.0, 2.0, 1.0, 1.0, 0.0]]]), 2, 1).tolist() == [[[0, 1, 4]]]
