"""Which rows are kept, and what is refused."""

import pytest

from mlx_kv.testing.driving import feed, new_cache, random_tokens, to_numpy
from mlx_kv_example import Example, select


def test_first_and_newest_rows_are_selected():
    assert select(rows=10, budget=5, sinks=2).tolist() == [0, 1, 7, 8, 9]


def test_a_prompt_is_brought_down_to_its_budget_at_its_end():
    cache, tokens = new_cache("example(budget=5, sinks=2)"), random_tokens(0, 10)
    feed(cache, tokens, [9, 1])
    assert cache.offset == 10
    assert (to_numpy(cache.keys_and_values()[0]) == to_numpy(tokens.keys)[:, [0, 1, 7, 8, 9]]).all()


def test_more_sinks_than_the_budget_are_refused():
    with pytest.raises(ValueError, match=r"\[example\] expected sinks from 0 to below budget 4, got 4"):
        Example(budget=4)
