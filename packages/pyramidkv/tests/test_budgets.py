"""How rows are shared out among the layers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv_pyramidkv import layer_budgets


@pytest.mark.parametrize(("prompt_length", "beyond_the_window"), [(4096, [110, 74, 38, 2]), (115, [107, 73, 39, 5])])
def test_worked_examples(prompt_length, beyond_the_window):
    assert layer_budgets(4, 64, 8, 20, prompt_length) == [8 + rows for rows in beyond_the_window]


shapes = st.tuples(
    st.integers(1, 80), st.integers(0, 2000), st.integers(1, 64), st.integers(1, 200), st.integers(1, 20000)
)


@given(shapes)
def test_laws(shape):
    layers, average, window, beta, prompt_length = shape
    budget = average + window
    rows = layer_budgets(layers, budget, window, beta, prompt_length)
    assert len(rows) == layers
    if prompt_length < budget:
        assert rows == [prompt_length] * layers
        return
    assert sum(rows) == layers * budget
    assert min(rows) >= window
    assert max(rows) <= prompt_length
    assert rows == sorted(rows, reverse=True)
    if prompt_length < 2 * average or layers == 1:
        assert rows == [budget] * layers


@given(shapes)
def test_every_layer_is_within_one_row_of_the_line(shape):
    layers, average, window, beta, prompt_length = shape
    if layers == 1 or prompt_length < max(average + window, 2 * average):
        return
    least = average // beta
    most = min(2 * average - least, prompt_length - window)
    least = 2 * average - most
    for layer, rows in enumerate(layer_budgets(layers, average + window, window, beta, prompt_length)):
        line = most - Fraction((most - least) * layer, layers - 1)
        assert rows - window in (int(line), int(line) + 1)


def test_the_largest_fractions_are_rounded_up():
    # The line of 7 rows over 4 layers from 14 to 0 is 14, 9 1/3, 4 2/3, 0: the missing row goes to the third.
    assert layer_budgets(4, 7, 0, 8, 100) == [14, 9, 5, 0]


def test_equal_fractions_are_rounded_up_in_the_lower_layer():
    # 10 rows over 5 layers, from 19 to 1: 19, 14 1/2, 10, 5 1/2, 1.
    assert layer_budgets(5, 10, 0, 10, 100) == [19, 15, 10, 5, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64, 8, 20, 100), "layers of at least 1, got 0"),
        ((4, 64, -1, 20, 100), "window of at least 0, got -1"),
        ((4, 7, 8, 20, 100), "budget of at least 8, got 7"),
        ((4, 64, 8, 0, 100), "beta of at least 1, got 0"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=rf"\[pyramidkv\] expected {message}"):
        layer_budgets(*arguments)
