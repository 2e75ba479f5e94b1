"""Ragged row buffers, against a list of NumPy rows per sequence."""

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_kv.rows import RowBuffer

HEADS, WIDTH = 2, 3


class Buffers(RuleBasedStateMachine):
    """A buffer and, of every sequence, its rows [heads, rows, width]."""

    @initialize(batch=st.integers(1, 3), step=st.sampled_from([1, 4, 16]))
    def start(self, batch, step):
        self.buffer = RowBuffer(step)
        self.rows = [np.zeros((HEADS, 0, WIDTH), np.float32) for _ in range(batch)]
        self.other = None
        self.next = 0.0

    def fresh(self, batch, chunk):
        numbers = np.arange(self.next, self.next + batch * HEADS * chunk * WIDTH, dtype=np.float32)
        self.next += numbers.size
        return numbers.reshape(batch, HEADS, chunk, WIDTH)

    @rule(data=st.data(), chunk=st.integers(1, 20))
    def append(self, data, chunk):
        spans = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, chunk)] * 2)))) for _ in self.rows]
        new = self.fresh(len(self.rows), chunk)
        self.buffer.append(mx.array(new), spans)
        self.rows = [
            np.concatenate([old, new[b, :, first:last]], axis=1)
            for b, (old, (first, last)) in enumerate(zip(self.rows, spans, strict=True))
        ]

    @rule(data=st.data(), front=st.booleans())
    def drop(self, data, front):
        if not self.buffer.begins:
            return
        counts = [data.draw(st.integers(0, rows.shape[1])) for rows in self.rows]
        if front:
            self.buffer.drop_front(counts)
            self.rows = [rows[:, n:] for rows, n in zip(self.rows, counts, strict=True)]
        else:
            self.buffer.drop_back(counts)
            self.rows = [rows[:, : rows.shape[1] - n] for rows, n in zip(self.rows, counts, strict=True)]

    @rule(data=st.data())
    def take(self, data):
        lengths = [rows.shape[1] for rows in self.rows]
        if not min(lengths):
            return
        longest = max(lengths)
        counts = [data.draw(st.integers(0, n)) for n in lengths]
        indices = np.zeros((len(self.rows), HEADS, longest), np.int32)
        for b, n in enumerate(lengths):
            for head in range(HEADS):
                order = data.draw(st.permutations(range(n)))
                indices[b, head, : counts[b]] = sorted(order[: counts[b]])
        self.buffer.take(mx.array(indices), counts)
        self.rows = [
            np.take_along_axis(rows, indices[b, :, : counts[b], None], axis=1) for b, rows in enumerate(self.rows)
        ]

    @rule(data=st.data())
    def select(self, data):
        if not self.buffer.begins:
            return
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.other = self.buffer, self.rows  # must stay as it is
        self.buffer, self.rows = self.buffer.select(chosen), [self.rows[b] for b in chosen]

    @rule()
    def extend(self):
        if self.other is None or len(self.rows) + len(self.other[1]) > 6:
            return
        if self.buffer.begins:
            self.buffer.extend(self.other[0])
            self.rows = self.rows + self.other[1]

    @rule()
    def reload(self):
        loaded = RowBuffer(self.buffer.step)
        loaded.load(self.buffer.data, self.buffer.places)
        self.buffer = loaded

    @invariant()
    def holds_the_rows(self):
        if not hasattr(self, "buffer") or not self.buffer.begins:
            return
        for buffer, rows in [(self.buffer, self.rows)] + ([self.other] if self.other else []):
            assert buffer.lengths == [r.shape[1] for r in rows]
            assert all(b <= e <= m for b, e, m in zip(buffer.begins, buffer.ends, buffer.limits, strict=True))
            if any(buffer.lengths):
                view = np.array(buffer.view())
                assert view.shape[2] == max(buffer.lengths)
                for b, right in enumerate(rows):
                    np.testing.assert_array_equal(view[b, :, : right.shape[1]], right)
                # Else every kernel that reads it would copy it first, at every token.
                assert memoryview(buffer.data).c_contiguous


Buffers.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestBuffers = Buffers.TestCase


def test_a_view_of_an_empty_buffer_is_refused():
    with pytest.raises(ValueError, match=r"\[rows\] an empty buffer has no rows to view"):
        RowBuffer().view()


@pytest.mark.parametrize("batch", [1, 3])
def test_room_is_bounded(batch):
    """A buffer that slides never holds more than a few steps beyond its rows."""
    buffer = RowBuffer(16)
    for _ in range(300):
        buffer.append(mx.zeros((batch, 1, 5, 2)), [(0, 5)] * batch)
        buffer.drop_front([max(n - 40, 0) for n in buffer.lengths])
        assert buffer.data.shape[2] <= batch * (40 + 4 * 16)
