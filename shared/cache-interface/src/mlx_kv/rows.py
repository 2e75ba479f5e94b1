"""Rows of a batch in one array, every sequence with its own length and its own room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import gather_rows
from mlx_kv_kernels.numbers import numbers

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

Span = tuple[int, int]  # the rows first..last-1 of a chunk that are real; the others are batch padding
ONE_TOKEN: list[Span] = [(0, 1)]  # the spans of a single token of the only sequence


class RowBuffer:
    """A growing array [1, heads, total rows, width] of a batch's sequences one after the other, none padded.

    Sequence b holds the rows begins[b]..ends[b]-1 of the array and may grow up to limits[b]. These places live on the
    host, so no operation reads the device back. Room grows by multiples of `step` rows. Appending to all sequences, or
    reading them, is one launch for the whole batch.
    """

    def __init__(self, step: int = 256) -> None:
        """Make an empty buffer; the first append tells how many sequences there are, `clear` does so before it."""
        self.step = step
        self.clear(0)

    def clear(self, batch: int) -> None:
        """Forget everything and hold `batch` empty sequences."""
        self.data: mx.array | None = None
        self.begins = [0] * batch
        self.ends = [0] * batch
        self.limits = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Rows held by each sequence."""
        if len(self.ends) == 1:  # asked for several times a layer at every step
            return [self.ends[0] - self.begins[0]]
        return [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]

    @property
    def room(self) -> list[int]:
        """Rows for which each sequence has room."""
        return [limit - end for limit, end in zip(self.limits, self.ends, strict=True)]

    def append(self, rows: Shaped[mx.array, "batch heads chunk width"], spans: Sequence[Span]) -> None:
        """Append the rows spans[b][0]..spans[b][1]-1 of each sequence b of a chunk."""
        if not self.begins:
            self.clear(len(spans))
        if len(spans) == 1:
            return self._append_to_one(rows, *spans[0])
        counts = [last - first for first, last in spans]
        if not any(counts):
            return None
        data = self.reserve(counts, rows.shape[1], rows.shape[3], rows.dtype)
        sequence = mx.array([b for b, n in enumerate(counts) for _ in range(n)])
        source = mx.array(list(chain.from_iterable(range(*span) for span in spans)))
        target = mx.array([end + i for end, n in zip(self.ends, counts, strict=True) for i in range(n)])
        data[:, :, target] = rows[sequence, :, source].swapaxes(0, 1)[None]
        return self.advance(counts)

    def put(
        self,
        sequences: Sequence[int],
        places: Int[mx.array, "sequences heads"],
        rows: Shaped[mx.array, "batch heads 1 width"],
    ) -> None:
        """Write a row of each head of these sequences, at places counted from a sequence's first row."""
        if self.data is None:
            raise ValueError("[rows] an empty buffer has no rows to write over")
        begins = [self.begins[b] for b in sequences]
        if any(begins):  # else a launch is saved
            places = places + numbers(tuple(begins), places.dtype)[:, None]
        if rows.shape[0] == 1:  # as at every step of one sequence
            self.data = put_rows(self.data, mx.expand_dims(places, (2, 3)), rows)
        else:
            self.data = put_rows(self.data, places.T[None, ..., None], rows[mx.array(list(sequences))].swapaxes(0, 2))

    def reserve(self, counts: Sequence[int], heads: int, width: int, dtype: mx.Dtype) -> mx.array:
        """Return the array, with room for counts[b] more rows; a new one if there is none."""
        if not self.begins:
            self.clear(len(counts))
        if self.data is None:
            self.data = mx.zeros((1, heads, 0, width), dtype)
        if any([end + n > limit for end, n, limit in zip(self.ends, counts, self.limits, strict=True)]):
            self._rebuild(self._rooms(counts))
        return self.data

    def advance(self, counts: Sequence[int]) -> None:
        """Count counts[b] more rows as held, which have been written where `reserve` made room."""
        self.ends = [end + n for end, n in zip(self.ends, counts, strict=True)]

    def view(self) -> Shaped[mx.array, "batch heads rows width"]:
        """Return every sequence from its first row on; what lies beyond a sequence's own length has no meaning."""
        if len(self.begins) == 1 and self.data is not None:
            return self.data[:, :, self.begins[0] : self.ends[0]]
        return self.part([(0, length) for length in self.lengths])

    def part(self, spans: Sequence[Span]) -> Shaped[mx.array, "batch heads rows width"]:
        """Return the rows spans[b] of each sequence; what lies beyond a shorter span has no meaning."""
        if self.data is None:
            raise ValueError("[rows] an empty buffer has no rows to view")
        if len(spans) == 1:
            (first, last), begin = spans[0], self.begins[0]
            return self.data[:, :, begin + first : begin + last]
        firsts = [begin + first for begin, (first, _) in zip(self.begins, spans, strict=True)]
        places = mx.array(firsts)[:, None] + mx.arange(max(last - first for first, last in spans))
        # Places beyond a shorter sequence's room are held at its last row, inside the array.
        places = mx.minimum(places, mx.array([max(limit - 1, 0) for limit in self.limits])[:, None])
        return self.data[0][:, places].swapaxes(0, 1)

    def drop_front(self, counts: Sequence[int]) -> None:
        """Forget the oldest counts[b] rows of each sequence, and give their room back once it exceeds a step."""
        self.begins = [begin + n for begin, n in zip(self.begins, counts, strict=True)]
        rooms = self._rooms([0] * len(counts))
        if self.limits and self.limits[-1] - sum(rooms) > self.step * len(counts):
            self._rebuild(rooms)

    def drop_back(self, counts: Sequence[int]) -> None:
        """Forget the newest counts[b] rows of each sequence."""
        self.ends = [end - n for end, n in zip(self.ends, counts, strict=True)]

    def take(self, indices: Int[mx.array, "batch heads kept"], counts: Sequence[int]) -> None:
        """Keep the rows `indices` of each head, the first counts[b] of them in sequence b, in the order given."""
        kept = gather_rows(self.view(), indices)
        self.clear(len(counts))
        if len(counts) == 1 and counts[0] == kept.shape[2]:
            self.data, self.ends, self.limits = kept, [counts[0]], [counts[0]]
        else:
            self.append(kept, [(0, n) for n in counts])

    def select(self, sequences: Sequence[int]) -> RowBuffer:
        """Return a new buffer with these sequences of the batch, in this order."""
        chosen = RowBuffer(self.step)
        chosen.data = self.data
        chosen.begins = [self.begins[b] for b in sequences]
        chosen.ends = [self.ends[b] for b in sequences]
        chosen.limits = [self.limits[b] for b in sequences]
        chosen._rebuild(chosen._rooms([0] * len(sequences)))
        return chosen

    def extend(self, other: RowBuffer) -> None:
        """Append the sequences of another buffer to the batch."""
        shift = 0 if self.data is None else self.data.shape[2]
        data = [array for array in (self.data, other.data) if array is not None]
        if data:
            self.data = mx.concatenate(data, axis=2) if len(data) > 1 else data[0][:]
        self.begins = self.begins + [shift + i for i in other.begins]
        self.ends = self.ends + [shift + i for i in other.ends]
        self.limits = self.limits + [shift + i for i in other.limits]

    @property
    def places(self) -> dict[str, list[int]]:
        """Where the sequences stand in `data`, for `load`."""
        return {"begins": self.begins, "ends": self.ends, "limits": self.limits}

    def load(self, data: mx.array | None, places: dict[str, list[int]]) -> None:
        """Take over another buffer's `data` and `places`."""
        # A handle of its own: assigning rows through a shared one would change the other buffer's array as well.
        self.data = None if data is None else data[:]
        self.begins, self.ends, self.limits = (list(places[name]) for name in ("begins", "ends", "limits"))

    def _append_to_one(self, rows: mx.array, first: int, last: int) -> None:
        """Append to the only sequence: what decoding does several times a layer, without lists."""
        count, end = last - first, self.ends[0]
        if count == 0:
            return
        data = self.data
        if data is None or end + count > self.limits[0]:
            data = self.reserve([count], rows.shape[1], rows.shape[3], rows.dtype)
            end = self.ends[0]
        new = rows if count == rows.shape[2] else rows[:, :, first:last]
        if count == data.shape[2]:
            # MLX would make the slice itself the buffer, which keeps alive all that the chunk is a view of, and whose
            # order kernels would put right at every token. Joined to no rows, it is copied.
            new = mx.concatenate([new, new[:, :, :0]], axis=2)
        data[:, :, end : end + count] = new
        self.ends = [end + count]

    def _rooms(self, counts: Sequence[int]) -> list[int]:
        # Sequences of a batch fill up at different times, and each time all of them move: half a step of air keeps that
        # rare.
        air = self.step // 2 if len(counts) > 1 else 0
        wanted = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        return [-(-(n + air) // self.step) * self.step if n else 0 for n in wanted]

    def _rebuild(self, rooms: Sequence[int]) -> None:
        """Move every sequence to the front of a room of its own in a new array."""
        lengths = self.lengths
        if self.data is not None:
            _, heads, _, width = self.data.shape
            parts: list[mx.array] = []
            for begin, length, room in zip(self.begins, lengths, rooms, strict=True):
                parts.append(self.data[:, :, begin : begin + length])
                parts.append(mx.zeros((1, heads, room - length, width), self.data.dtype))
            self.data = mx.concatenate(parts, axis=2) if sum(rooms) else None
        self.limits = list(accumulate(rooms))
        self.begins = [limit - room for limit, room in zip(self.limits, rooms, strict=True)]
        self.ends = [begin + length for begin, length in zip(self.begins, lengths, strict=True)]


def put_rows(
    data: Shaped[mx.array, "1 heads total width"],
    places: Int[mx.array, "1 heads rows 1"],
    rows: Shaped[mx.array, "1 heads rows width"],
) -> Shaped[mx.array, "1 heads total width"]:
    """Return `data` with rows of each head at `places`; in the same memory, if nobody else holds the array."""
    return mx.put_along_axis(data, places, rows, axis=2)


def refuse_others(held: tuple[int, int] | None, rows: Shaped[mx.array, "batch heads chunk width"]) -> None:
    """Refuse rows of other heads or another width than those held, with ValueError; anything goes with None."""
    heads, width = rows.shape[1], rows.shape[3]
    if held is not None and (heads, width) != held:
        raise ValueError(
            f"[mlx_kv] expected rows of {held[0]} heads and {held[1]} channels, as the store holds, "
            f"got {heads} and {width}"
        )
