"""A dense store's rows change places: the newest over the one that goes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import DenseStore, Policy
from mlx_kv.store import Store


class DropsAtEveryStep(Policy):
    evicts = evicts_while_decoding = evicts_every_step = True


@pytest.fixture(params=[False, True], ids=["written", "waiting"])
def filled(request):
    """`filled(lengths)`, with the newest row in the buffers or waiting beside them."""
    return lambda lengths: make(lengths, request.param)


def make(lengths, waits):
    """A store of two heads whose row r of sequence b is the number 100 b + 10 r + head, and a newest row of 7 + b."""
    rows = np.arange(max(lengths) + 1)
    keys = 100 * np.arange(len(lengths))[:, None, None] + 10 * rows + np.arange(2)[:, None]
    keys = mx.array(keys[..., None].astype(np.float32))
    store = DenseStore()
    if waits:
        store.accept(DropsAtEveryStep())
    store.append(keys, -keys, [(0, n) for n in lengths])
    newest = mx.full((len(lengths), 2, 1, 1), 7.0) + mx.arange(len(lengths))[:, None, None, None]
    store.append(newest, -newest)
    return store


def rows(store):
    keys, values = store.dense()
    assert mx.array_equal(keys, -values)
    return [keys[b, :, :n, 0].tolist() for b, n in enumerate(store.lengths)]


def test_the_newest_row_takes_a_place_of_each_head(filled):
    store = filled([3])
    store.replace([0], mx.array([[0, 2]], mx.uint32))
    assert store.lengths == [3]
    store.settle()
    assert rows(store) == [[[7, 10, 20], [1, 11, 7]]]
    store.append(mx.full((1, 2, 1, 1), 9.0), mx.full((1, 2, 1, 1), -9.0))
    assert rows(store) == [[[7, 10, 20, 9], [1, 11, 7, 9]]]


def test_appending_settles_first(filled):
    store = filled([3])
    store.replace([0], mx.array([[1, 1]], mx.uint32))
    store.append(mx.full((1, 2, 2, 1), 9.0), mx.full((1, 2, 2, 1), -9.0))
    assert rows(store) == [[[0, 7, 20, 9, 9], [1, 7, 21, 9, 9]]]


def test_only_some_sequences_of_a_batch(filled):
    store = filled([2, 3, 1])
    store.replace([2, 1], mx.array([[0, 0], [2, 1]], mx.uint32))
    store.settle()
    assert store.lengths == [3, 3, 1]
    assert rows(store) == [[[0, 10, 7], [1, 11, 7]], [[100, 110, 8], [101, 8, 121]], [[9], [9]]]


def test_the_newest_row_itself_can_go(filled):
    store = filled([2])
    store.replace([0], mx.array([[2, 2]], mx.uint32))
    store.settle()
    assert rows(store) == [[[0, 10], [1, 11]]]


def test_what_is_read_before_a_row_goes(filled):
    store = filled([2, 3])
    assert rows(store) == [[[0, 10, 7], [1, 11, 7]], [[100, 110, 120, 8], [101, 111, 121, 8]]]
    store.replace([1], mx.array([[0, 1]], mx.uint32))
    assert store.lengths == [3, 3]
    store.settle()
    assert rows(store) == [[[0, 10, 7], [1, 11, 7]], [[8, 110, 120], [101, 8, 121]]]


def test_a_sequence_without_a_new_row():
    store = make([2, 1], waits=True)
    store.append(mx.full((2, 2, 1, 1), 9.0), mx.full((2, 2, 1, 1), -9.0), [(0, 0), (0, 1)])
    assert store.lengths == [3, 3]
    store.replace([1], mx.array([[2, 0]], mx.uint32))
    store.settle()
    assert rows(store) == [[[0, 10, 7], [1, 11, 7]], [[100, 8], [9, 8]]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda store: store.take(mx.array([[[1, 2], [0, 2]]]), [2]), [[[10, 7], [1, 7]]]),
        (lambda store: store.truncate(1), [[[0, 10], [1, 11]]]),
        (lambda store: store.select([0, 0]), [[[0, 10, 7], [1, 11, 7]]] * 2),
    ],
)
def test_a_waiting_row_is_a_row_like_others(filled, change, expected):
    store = filled([2])
    assert rows(change(store) or store) == expected


def test_no_rows_have_no_layout():
    """The first step of a batch may be padding in every sequence: there is nothing for a kernel to read."""
    store = DenseStore()
    store.accept(DropsAtEveryStep())
    row = mx.ones((2, 2, 1, 1))
    store.append(row, row, [(0, 0), (0, 0)])
    assert store.lengths == [0, 0]
    assert store.layout() is None
    store.append(row, row, [(0, 1), (0, 0)])
    assert store.layout().extent.rows == (1, 0)


def test_a_store_that_cannot():
    class Ordered(DenseStore):
        replaces = False
        replace = Store.replace

    with pytest.raises(ValueError, match=r"\[Ordered\] rows cannot change places; use take_from"):
        Ordered().replace([0], mx.array([[0, 0]]))
