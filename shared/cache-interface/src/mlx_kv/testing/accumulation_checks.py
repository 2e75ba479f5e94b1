"""Checks that any policy which adds up attention must pass, besides those that every method must."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..accumulation import BLOCK, AccumulatingPolicy
from ..cache import CompressedKVCache
from ..dense import DenseStore
from ..spec import Spec
from .driving import (
    GEOMETRY,
    SCALE,
    ConformanceError,
    Tokens,
    contents,
    exact_attention,
    expect,
    feed,
    new_cache,
    random_tokens,
    same_bits,
    step,
    to_numpy,
)
from .models import tiny_model

_BUDGET = 32
"""Rows that the specs under these checks must keep of any prompt longer than that."""


def positions(cache: CompressedKVCache) -> list[list[list[int]]]:
    """Return the positions of the rows held, in the order of the store's rows, by sequence and KV head."""
    policy = cast("AccumulatingPolicy", cache.policy)
    held: list[Any] = policy.positions.view()[..., 0].tolist()  # type: ignore[assignment]
    return [[head[:rows] for head in one] for one, rows in zip(held, policy.positions.lengths, strict=True)]


def kept(cache: CompressedKVCache) -> list[list[list[int]]]:
    """Return the positions of the rows held, ascending, by sequence and KV head."""
    return [[sorted(head) for head in one] for one in positions(cache)]


def scores(cache: CompressedKVCache) -> list[list[dict[int, float]]]:
    """Return the score of every position held, by sequence and KV head."""
    policy = cast("AccumulatingPolicy", cache.policy)
    summed: list[Any] = policy.scores.view()[..., 0].tolist()  # type: ignore[assignment]
    return [
        [dict(zip(places, head, strict=False)) for places, head in zip(one, of_one, strict=True)]
        for one, of_one in zip(positions(cache), summed, strict=True)
    ]


def check_tokens_attend_to_the_rows_held(spec: str) -> None:
    """Every output is exact attention over the tokens whose positions are held: no row is lost or held twice."""
    cache, seen = new_cache(spec), random_tokens(0, 0)
    for turn, n in enumerate((60, 41, *[1] * 40, 7, *[1] * 10)):
        before = kept(cache)[0] if seen.count else [list[int]()] * 2
        tokens = random_tokens(turn, n)
        output = step(cache, tokens)
        first = seen.count
        seen = Tokens(*(mx.concatenate([getattr(seen, f), getattr(tokens, f)], axis=2) for f in _FIELDS))
        for head, held in enumerate(before):
            rows = [*held, *range(first, first + n)]
            expect(len(set(rows)) == len(rows), spec, f"a position is held twice: {rows}")
            own = slice(head * 2, head * 2 + 2)
            keys, values = (to_numpy(x)[head : head + 1, rows] for x in (seen.keys, seen.values))
            right = exact_attention(to_numpy(tokens.queries)[own], keys, values, SCALE)
            error = np.abs(to_numpy(output)[own] - right).max()
            # float32 attention over some hundred rows; values are of the order of 1
            expect(error < 1e-4, spec, f"call {turn} is answered with an error of {error}")


def check_the_budget_holds_after_every_step(spec: str) -> None:
    """Rows never exceed the budget once a prompt has ended; offset goes on counting; memory stands still."""
    cache = new_cache(spec)
    feed(cache, random_tokens(0, 150), [100, 49, 1])
    held: list[int] = []
    for turn in range(2):
        for i in range(60):
            expect(cache.store.lengths == [_BUDGET], spec, f"holds {cache.store.lengths} rows of {_BUDGET}")
            step(cache, random_tokens(100 * turn + i, 1))
            held.append(cache.nbytes)
        expect(len(set(held[-50:])) == 1, spec, f"bytes held go on changing: {sorted(set(held[-50:]))}")
        feed(cache, random_tokens(7, 40), [39, 1])
    expect(cache.offset == 150 + 2 * 100, spec, f"offset must be 350, got {cache.offset}")


def check_the_newest_tokens_stay(spec: str) -> None:
    """The window is the newest tokens, whatever attention they have had."""
    cache = new_cache(spec)
    feed(cache, random_tokens(0, 150), [149, 1])
    options = cast("AccumulatingPolicy", cache.policy).options
    recent = cast("Any", options.kept(150)).recent
    for i in range(30):
        step(cache, random_tokens(i, 1))
        newest = list(range(151 + i - recent, 151 + i))
        expect(all(head[-recent:] == newest for head in kept(cache)[0]), spec, f"{newest} are not all held")


def check_any_chunks_keep_the_same_rows(spec: str) -> None:
    """A prompt in any chunks longer than one token, the last token alone, keeps the same rows with the same scores."""
    tokens, later = random_tokens(0, 300), random_tokens(1, 20)
    right: list[CompressedKVCache] = []
    for chunks in ((299, 1), (128, 128, 43, 1), (*[2] * 148, 3, 1), (290, 9, 1), (33, 200, 66, 1)):
        cache = new_cache(spec)
        feed(cache, tokens, chunks)
        feed(cache, later, [1] * 20)
        right = right or [cache]
        expect(kept(cache) == kept(right[0]), spec, f"chunks of {chunks[:3]}... keep other rows")
        for head, expected in zip(scores(cache)[0], scores(right[0])[0], strict=True):
            # float32 sums of 300 probabilities in another order
            near = np.allclose([head[p] for p in expected], list(expected.values()), rtol=1e-4)
            expect(near, spec, f"chunks of {chunks[:3]}... give other scores")


def check_generations_share_nothing(spec: str) -> None:
    """A second prompt in a new cache keeps what it keeps in a new process' first."""
    first, second = random_tokens(0, 120), random_tokens(1, 130)
    alone = new_cache(spec)
    right = feed(alone, second, [129, 1])
    cache = new_cache(spec)
    twin = copy.deepcopy(cache)
    feed(cache, first, [119, 1])
    fresh = CompressedKVCache(cache.policy.fresh(), cache.store.fresh())
    for name, each in (("a new cache", new_cache(spec)), ("a copy made before", twin), ("a fresh one", fresh)):
        same = same_bits(feed(each, second, [129, 1]), right) and scores(each) == scores(alone)
        expect(same, spec, f"{name} remembers another generation")


def check_sequences_of_a_batch_score_as_alone(spec: str) -> None:
    """In a batch of two, each sequence has the rows, order and scores that it has alone."""
    solos = [new_cache(spec) for _ in range(2)]
    prompts = [random_tokens(0, 150), random_tokens(1, 90)]
    batch = type(solos[0]).merge([new_cache(spec) for _ in prompts])
    batch.prepare(lengths=[150, 90], right_padding=[0, 60])
    padding = random_tokens(9, 60)
    padded = _batch([prompts[0], Tokens(*(_joined(prompts[1], padding)))])
    step(batch, padded[:149])
    batch.finalize()
    for solo, prompt in zip(solos, (prompts[0][:149], prompts[1]), strict=True):
        step(solo, prompt)
    for i in range(25):
        tokens = [random_tokens(50 * i + b, 1) for b in range(2)]
        step(batch, _batch(tokens))
        for solo, own in zip(solos, tokens, strict=True):
            step(solo, own)
        same = positions(batch) == [positions(solo)[0] for solo in solos]
        expect(same, spec, "a sequence of a batch holds other rows than alone")
        for b, solo in enumerate(solos):
            near = _near(scores(batch)[b], scores(solo)[0])
            expect(near, spec, "a sequence of a batch has other scores than alone")
    batch.store.settle()
    for solo in solos:
        solo.store.settle()
    expect(contents(batch.store) == contents(solos[0].store) + contents(solos[1].store), spec, "the rows differ")


def check_saved_scores_go_on(spec: str) -> None:
    """A cache rebuilt from its state has the same scores, to the bit, and so has what follows."""
    cache, later = new_cache(spec), random_tokens(5, 30)
    feed(cache, random_tokens(0, 150), [100, 49, 1])
    feed(cache, random_tokens(1, 20), [1] * 20)
    other = type(cache).from_state(cache.state)
    expect(scores(other) == scores(cache), spec, "other scores are loaded than were saved")
    for each in (cache, other):
        feed(each, later, [1] * 30)
    expect(scores(other) == scores(cache) and kept(other) == kept(cache), spec, "a loaded cache goes on otherwise")


class OrderedStore(DenseStore):
    """Stands for a store whose rows are packed one by one and cannot change places."""

    replaces = False


def check_blocks_over_rows_that_stay_in_order(spec: str) -> None:
    """Where rows cannot change places, they stay ascending, and up to BLOCK - 1 more than the budget are held."""
    policy, _ = Spec.parse(spec).create(GEOMETRY)
    cache = CompressedKVCache(policy, OrderedStore())
    feed(cache, random_tokens(0, 150), [149, 1])
    for i in range(3 * BLOCK):
        over = i % BLOCK
        expect(cache.store.lengths == [_BUDGET + over], spec, f"{i} steps hold {cache.store.lengths} rows")
        expect(positions(cache) == kept(cache), spec, f"rows have left their order: {positions(cache)}")
        step(cache, random_tokens(i, 1))


def check_peak_of_a_long_prompt(spec: str) -> None:
    """8,192 tokens through a tiny model: peak memory within 1.2 times that of the full cache."""
    from ..factory import make_prompt_cache

    model = tiny_model("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    tokens = mx.random.randint(0, 128, (1, 8192), key=mx.random.key(0))
    peaks: list[int] = []
    for each in ("dense", spec):
        cache = make_prompt_cache(model, each)
        mx.clear_cache()
        mx.reset_peak_memory()
        for chunk in (*(tokens[:, i : min(i + 2048, 8191)] for i in range(0, 8191, 2048)), tokens[:, 8191:]):
            mx.eval(model(chunk, cache=cache), [layer.state for layer in cache])
        peaks.append(mx.get_peak_memory())
    expect(peaks[1] <= 1.2 * peaks[0], spec, f"the peak is {peaks[1]} bytes, the full cache's {peaks[0]}")


_FIELDS = ("queries", "keys", "values")


def _joined(*tokens: Tokens) -> list[mx.array]:
    return [mx.concatenate([getattr(t, f) for t in tokens], axis=2) for f in _FIELDS]


def _batch(tokens: Sequence[Tokens]) -> Tokens:
    return Tokens(*(mx.concatenate([getattr(t, f) for t in tokens]) for f in _FIELDS))


def _near(a: list[dict[int, float]], b: list[dict[int, float]]) -> bool:
    """Tell whether scores are equal but for the order of sums in attention over a batch."""
    return all(np.allclose([x[p] for p in y], list(y.values()), rtol=1e-5) for x, y in zip(a, b, strict=True))


ACCUMULATION_CHECKS: tuple[Callable[[str], None], ...] = tuple(
    function for name, function in vars().items() if name.startswith("check_")
)
"""Functions of a spec that keeps `_BUDGET` rows of a prompt, and raise ConformanceError where it breaks a rule."""

__all__ = ["ACCUMULATION_CHECKS", "ConformanceError", "kept", "positions", "scores"]
