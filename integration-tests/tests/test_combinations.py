"""Policies over stores that compress: rows are selected in full precision, then quantised, once."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv.testing import CHECKS, check_name
from mlx_kv.testing.driving import contents, feed, new_cache, new_store, random_tokens, step

pytestmark = pytest.mark.needs("kivi")


@pytest.mark.needs("pyramidkv")
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    check("pyramidkv(budget=100, every_chunk=True)+kivi(residual=32)")


@pytest.mark.needs("snapkv")
@pytest.mark.parametrize("every_chunk", [False, True])
def test_what_is_kept_is_selected_in_full_precision_and_quantised_once(every_chunk):
    policy, store = f"snapkv(budget=100, every_chunk={every_chunk})", "kivi(residual=32)"
    over_dense, over_kivi = new_cache(f"{policy}+dense"), new_cache(f"{policy}+{store}")
    tokens = random_tokens(0, 400)
    for cache in (over_dense, over_kivi):
        feed(cache, tokens, [150, 150, 99, 1])
    expected = new_store(store)
    expected.append(*over_dense.keys_and_values())
    expected.settle()
    assert contents(over_kivi.store) == contents(expected)


@pytest.mark.needs("snapkv")
def test_a_prompt_is_never_held_twice():
    """Neither beside its codes before the selection nor beside the kept rows after it."""
    cache, dense = new_cache("snapkv(budget=100)+kivi(residual=32)"), new_cache("dense")
    tokens = random_tokens(0, 1000)
    for first in range(0, 999, 111):
        for each in (cache, dense):
            step(each, tokens[first : first + 111])
        queries = sum(array.nbytes for array in cache.policy.arrays().values())
        # keys and values in the tail of the store, which grows by 64 rows
        assert cache.store.nbytes <= dense.nbytes + 64 * 1024
        assert cache.nbytes == cache.store.nbytes + queries
        assert not cache.store.keys.codes.lengths[0]
    step(cache, tokens[999:])
    alone = new_store("kivi(residual=32)")
    alone.append(*cache.keys_and_values())
    alone.settle()
    assert cache.nbytes == cache.store.nbytes <= alone.nbytes


@pytest.mark.needs("snapkv")
def test_sequences_that_do_not_select_keep_their_codes_bit_for_bit():
    """A decoding sequence joins one whose prompt ends now."""
    spec = "snapkv(budget=100)+kivi(residual=32)"
    decoding, ending = new_cache(spec), new_cache(spec)
    feed(decoding, random_tokens(0, 180), [179, 1])
    feed(decoding, random_tokens(1, 40), [1] * 40)
    feed(ending, random_tokens(2, 300))
    batch = type(decoding).merge([decoding, ending])
    last = random_tokens(3, 1)
    both = type(last)(*(mx.concatenate([x, x]) for x in (last.queries, last.keys, last.values)))
    step(batch, both)
    step(decoding, last)
    step(ending, last)
    assert batch.store.lengths == [141, 100]
    for each in (batch, decoding, ending):
        each.store.settle()
    assert contents(batch.store) == contents(decoding.store) + contents(ending.store)


@pytest.mark.needs("snapkv")
def test_a_second_turn_over_quantised_rows_stays_within_budget():
    cache = new_cache("snapkv(budget=100)+kivi(residual=32)")
    for turn in range(3):
        feed(cache, random_tokens(turn, 200), [199, 1])
        assert cache.store.lengths == [100]
        assert np.isfinite(np.array(cache.keys_and_values()[0])).all()
        feed(cache, random_tokens(9 + turn, 10), [1] * 10)


@pytest.mark.needs("h2o", "rvq")
def test_rows_wait_to_be_packed_where_a_policy_watches_every_token():
    """To have arrays evaluated is no reason to pack."""
    cache = new_cache("h2o(heavy=96, recent=96)+rvq(center=False)")
    feed(cache, random_tokens(0, 300), [299, 1])
    for i in range(3):
        step(cache, random_tokens(i, 1))
    assert cache.store.rows_wait
