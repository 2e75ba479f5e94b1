"""A dense store's rows change places: the newest over the one that goes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import DenseStore
from mlx_kv.store import Store


def filled(lengths):
    """A store of two heads whose row r of sequence b is the number 100 b + 10 r + head."""
    rows = np.arange(max(lengths) + 1)
    keys = 100 * np.arange(len(lengths))[:, None, None] + 10 * rows + np.arange(2)[:, None]
    keys = mx.array(keys[..., None].astype(np.float32))
    store = DenseStore()
    store.append(keys, -keys, [(0, n) for n in lengths])
    newest = mx.full((len(lengths), 2, 1, 1), 7.0) + mx.arange(len(lengths))[:, None, None, None]
    store.append(newest, -newest)
    return store


def rows(store):
    keys, values = store.dense()
    assert mx.array_equal(keys, -values)
    return [keys[b, :, :n, 0].tolist() for b, n in enumerate(store.lengths)]


def test_the_newest_row_takes_a_place_of_each_head():
    store = filled([3])
    store.replace([0], mx.array([[0, 2]], mx.uint32))
    assert store.lengths == [3]
    store.settle()
    assert rows(store) == [[[7, 10, 20], [1, 11, 7]]]
    store.append(mx.full((1, 2, 1, 1), 9.0), mx.full((1, 2, 1, 1), -9.0))
    assert rows(store) == [[[7, 10, 20, 9], [1, 11, 7, 9]]]


def test_appending_settles_first():
    store = filled([3])
    store.replace([0], mx.array([[1, 1]], mx.uint32))
    store.append(mx.full((1, 2, 2, 1), 9.0), mx.full((1, 2, 2, 1), -9.0))
    assert rows(store) == [[[0, 7, 20, 9, 9], [1, 7, 21, 9, 9]]]


def test_only_some_sequences_of_a_batch():
    store = filled([2, 3, 1])
    store.replace([2, 1], mx.array([[0, 0], [2, 1]], mx.uint32))
    store.settle()
    assert store.lengths == [3, 3, 1]
    assert rows(store) == [[[0, 10, 7], [1, 11, 7]], [[100, 110, 8], [101, 8, 121]], [[9], [9]]]


def test_the_newest_row_itself_can_go():
    store = filled([2])
    store.replace([0], mx.array([[2, 2]], mx.uint32))
    store.settle()
    assert rows(store) == [[[0, 10], [1, 11]]]


def test_a_store_that_cannot():
    class Ordered(DenseStore):
        replaces = False
        replace = Store.replace

    with pytest.raises(ValueError, match=r"\[Ordered\] rows cannot change places; use take_from"):
        Ordered().replace([0], mx.array([[0, 0]]))
