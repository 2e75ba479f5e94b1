"""A random walk over everything that can be done to caches, against a model that stores every row."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ..cache import CompressedKVCache
from ..identity import fingerprint
from ..persistence import load_prompt_cache, save_prompt_cache
from .driving import Tokens, exact_attention, expect, new_cache, pad, random_tokens, step, to_numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rows = "tuple[NDArray[Any], NDArray[Any]]"
Oracle = Callable[["NDArray[Any]", "NDArray[Any]"], Rows]
"""What a store gives back for the keys and values [heads, rows, dim] of one sequence, once they have settled."""

_MOST_CACHES, _MOST_SEQUENCES, _MOST_ROWS = 5, 4, 500
_LENGTHS = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 80))


def exact(keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Give rows back as they are: the oracle of a dense store."""
    return keys, values


def _has_batch(machine: Any) -> bool:
    return any(pair.batch for pair in machine.pairs)


@dataclass
class Sequence:
    """Every row that a sequence has seen, and how many it has had at most."""

    keys: NDArray[Any]
    values: NDArray[Any]
    most: int = 0

    @property
    def count(self) -> int:
        """Rows seen and not taken back."""
        return self.keys.shape[1]

    def append(self, tokens: Tokens) -> None:
        """Append the rows of one sequence's tokens."""
        self.keys = np.concatenate([self.keys, to_numpy(tokens.keys)], axis=1)
        self.values = np.concatenate([self.values, to_numpy(tokens.values)], axis=1)
        self.most = max(self.most, self.count)

    def cut(self, rows: int) -> None:
        """Forget the newest rows."""
        rows = min(rows, self.count)
        self.keys, self.values = (a[:, : self.count - rows] for a in (self.keys, self.values))


@dataclass
class Pair:
    """A cache, and what each of its sequences has seen. `batch`: made by merge, and so with an offset per sequence."""

    spec: str
    cache: CompressedKVCache
    sequences: list[Sequence]
    batch: bool


def cache_machine(
    oracles: Mapping[str, Oracle], tolerance: float = 1e-4, max_examples: int = 300
) -> type[RuleBasedStateMachine]:
    """Return a state machine that each run drives with one of several specs.

    A test module calls it `TestCaches = cache_machine({...}).TestCase`. Specs must keep every row.

    Args:
        oracles: for each spec, what its store gives back.
        tolerance: of attention outputs, which are of the order of 1, in float32 against float64.
        max_examples: runs, of 30 steps each.
    """

    class Caches(RuleBasedStateMachine):
        """Caches of one spec, and every row they have seen."""

        def __init__(self) -> None:
            super().__init__()
            self.spec = ""
            self.pairs: list[Pair] = []
            self.draws = 0

        @initialize(spec=st.sampled_from(sorted(oracles)))
        def start(self, spec: str) -> None:
            self.spec = spec
            self.pairs = [self._empty()]

        @precondition(lambda self: len(self.pairs) < _MOST_CACHES)
        @rule()
        def make(self) -> None:
            self.pairs.append(self._empty())

        @rule(data=st.data(), length=_LENGTHS, borders=st.lists(st.integers(1, 40), max_size=2))
        def append(self, data: st.DataObject, length: int, borders: list[int]) -> None:
            """Append a chunk, cut at some borders."""
            pair = self._any(data)
            if not self._has_room(pair, length):
                return
            chunks = [b - a for a, b in zip([0, *sorted(borders)], [*sorted(borders), length], strict=True)]
            for chunk in (n for n in chunks if n > 0):
                self._step(pair, [chunk] * len(pair.sequences), "even")

        @precondition(_has_batch)
        @rule(data=st.data(), lengths=st.lists(_LENGTHS, min_size=_MOST_SEQUENCES, max_size=_MOST_SEQUENCES))
        def append_padded(self, data: st.DataObject, lengths: list[int]) -> None:
            """Append prompts of different length to a batch, padded on the right or, where it is empty, on the left."""
            pair = self._any(data, batches=True)
            if not self._has_room(pair, max(lengths)):
                return
            left = pair.cache.empty() and data.draw(st.booleans(), label="left")
            self._step(pair, lengths[: len(pair.sequences)], "left" if left else "right")

        @rule(data=st.data(), count=st.integers(1, 12))
        def trim(self, data: st.DataObject, count: int) -> None:
            """Take tokens back, or be refused without a change."""
            pair = self._any(data)
            reach = pair.cache.rollback
            shortest = min(s.count for s in pair.sequences)
            count = min(count, shortest)  # taking back more of a batch than its shortest sequence is no one's business
            allowed = reach is None or all(s.most - (s.count - count) <= reach for s in pair.sequences)
            if not count:
                return
            try:
                pair.cache.trim(count)
            except ValueError:
                expect(not allowed, self.spec, f"trim({count}) is within rollback={reach} and was refused")
            else:
                expect(allowed, self.spec, f"trim({count}) is beyond rollback={reach} and was done")
                for sequence in pair.sequences:
                    sequence.cut(count)

        @rule(data=st.data(), how=st.sampled_from(["file", "state", "deepcopy"]))
        def duplicate(self, data: st.DataObject, how: str) -> None:
            """Save and load, rebuild or copy; one of the two takes the other's place or joins it."""
            pair = self._any(data)
            cache = {"file": _through_file, "state": _through_state, "deepcopy": copy.deepcopy}[how](pair.cache)
            twin = Pair(self.spec, cache, copy.deepcopy(pair.sequences), pair.batch)
            if len(self.pairs) < _MOST_CACHES:
                self.pairs.append(twin)
            else:
                self.pairs[self.pairs.index(pair)] = twin

        @rule(data=st.data())
        def merge(self, data: st.DataObject) -> None:
            """Make a batch of caches that stay usable themselves."""
            solos = [pair for pair in self.pairs if not pair.batch]
            if not solos:
                return
            chosen = data.draw(st.lists(st.sampled_from(range(len(solos))), min_size=1, max_size=_MOST_SEQUENCES))
            caches = [solos[i].cache for i in dict.fromkeys(chosen)]
            sequences = [copy.deepcopy(solos[i].sequences[0]) for i in dict.fromkeys(chosen)]
            self._add(Pair(self.spec, type(caches[0]).merge(caches), sequences, batch=True))

        @precondition(_has_batch)
        @rule(data=st.data())
        def filter(self, data: st.DataObject) -> None:
            """Keep some sequences of a batch."""
            pair = self._any(data, batches=True)
            kept = data.draw(st.lists(st.sampled_from(range(len(pair.sequences))), min_size=1, unique=True))
            pair.cache.filter(kept)
            pair.sequences = [pair.sequences[b] for b in kept]

        @rule(data=st.data())
        def extend(self, data: st.DataObject) -> None:
            """Append one batch's sequences to another."""
            batches = [pair for pair in self.pairs if pair.batch]
            if len(batches) < 2:
                return
            first, second = data.draw(st.permutations(batches))[:2]
            if len(first.sequences) + len(second.sequences) > _MOST_SEQUENCES:
                return
            first.cache.extend(second.cache)
            first.sequences += copy.deepcopy(second.sequences)

        @precondition(_has_batch)
        @rule(data=st.data())
        def extract(self, data: st.DataObject) -> None:
            """Take a sequence out of a batch into a cache of its own."""
            pair = self._any(data, batches=True)
            b = data.draw(st.sampled_from(range(len(pair.sequences))))
            self._add(Pair(self.spec, pair.cache.extract(b), [copy.deepcopy(pair.sequences[b])], batch=False))

        def teardown(self) -> None:
            """End with one more token for every cache: nothing may have been spoilt from elsewhere."""
            for pair in self.pairs:
                self._step(pair, [1] * len(pair.sequences), "even")
            super().teardown()

        def _empty(self) -> Pair:
            cache = new_cache(self.spec)
            cache.origin["model"] = fingerprint(_MODEL)
            nothing = np.zeros((2, 0, 64), np.float32)
            return Pair(self.spec, cache, [Sequence(nothing, nothing)], batch=False)

        def _any(self, data: st.DataObject, batches: bool = False) -> Pair:
            pairs = [pair for pair in self.pairs if pair.batch or not batches]
            return pairs[data.draw(st.integers(0, len(pairs) - 1), label="cache")]

        def _add(self, pair: Pair) -> None:
            if len(self.pairs) == _MOST_CACHES:
                self.pairs.pop(0)
            self.pairs.append(pair)

        def _has_room(self, pair: Pair, length: int) -> bool:
            return pair.cache.size() + length <= _MOST_ROWS

        def _step(self, pair: Pair, lengths: list[int], padding: str) -> None:
            """Give each sequence tokens, and compare its answer with attention over the rows it has seen."""
            self.draws += 1
            tokens = [random_tokens(100 * self.draws + b, n) for b, n in enumerate(lengths)]
            longest = max(lengths)
            if padding == "left":
                pair.cache.prepare(left_padding=[longest - n for n in lengths])
            elif padding == "right":
                pair.cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
            output = step(pair.cache, pad(tokens, left=padding == "left"))
            if padding == "right":
                pair.cache.finalize()
            for b, (sequence, given) in enumerate(zip(pair.sequences, tokens, strict=True)):
                settled = oracles[self.spec](sequence.keys, sequence.values)
                chunk = to_numpy(given.keys), to_numpy(given.values)
                keys, values = (np.concatenate(both, axis=1) for both in zip(settled, chunk, strict=True))
                right = exact_attention(to_numpy(given.queries), keys, values)
                real = slice(longest - given.count, None) if padding == "left" else slice(given.count)
                error = np.abs(to_numpy(output[b : b + 1])[:, real] - right).max()
                # NaN is an error too.
                expect(error <= tolerance, self.spec, f"sequence {b} is answered with an error of {error}")
                sequence.append(given)
            seen = [sequence.count for sequence in pair.sequences]
            offset = pair.cache.offset
            got = [offset] if isinstance(offset, int) else offset.tolist()
            expect(got == seen, self.spec, f"offsets must count the tokens seen, {seen}, got {got}")
            expect(
                pair.cache.store.lengths == seen, self.spec, f"lengths must be {seen}, got {pair.cache.store.lengths}"
            )

    Caches.TestCase.settings = settings(max_examples=max_examples, stateful_step_count=30, deadline=None)
    return Caches


class _Model(nn.Module):
    """Something to save caches for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones((4,))


_MODEL = _Model()


def _through_state(cache: CompressedKVCache) -> CompressedKVCache:
    return type(cache).from_state(cache.state)


def _through_file(cache: CompressedKVCache) -> CompressedKVCache:
    if cache.empty():  # a file needs an array
        return _through_state(cache)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, [cache])
        return load_prompt_cache(file, _MODEL)[0]
