"""Batches: every sequence is what it would be alone, whatever is done to the others."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..cache import CompressedKVCache
from .driving import Tokens, contents, expect, feed, new_cache, pad, random_tokens, step

_PROMPTS = (190, 5, 64, 131)
# The same numbers summed in another order by attention over a batch; outputs are of the order of 1.
_TOLERANCE = 1e-5


def check_merged_sequences(spec: str) -> None:
    """Caches of different age, an empty one among them, go on in one batch as they would alone."""
    ages = (200, 33, 0, 129)
    solos = [_aged(spec, seed, age) for seed, age in enumerate(ages)]
    batch = type(solos[0]).merge([_aged(spec, seed, age) for seed, age in enumerate(ages)])
    _go_on(spec, batch, solos, "merged caches", first=50)
    lone = type(solos[0]).merge([_aged(spec, 7, 90)])
    _go_on(spec, lone, [_aged(spec, 7, 90)], "a batch of one")


def check_merging_leaves_the_merged_alone(spec: str) -> None:
    """Caches that were merged, and batches that were split or extended, stay usable and independent."""
    originals = [_aged(spec, seed, 100 + seed) for seed in range(2)]
    batch = type(originals[0]).merge(originals[:1])
    _go_on(spec, batch, [_aged(spec, 0, 100)], "a batch of one", first=30)
    batch.extend(type(batch).merge(originals[1:]))
    for seed, cache in enumerate(originals):
        _go_on(spec, cache, [_aged(spec, seed, 100 + seed)], "a cache that has been merged into a batch")
    single = batch.extract(1)
    expected = _aged(spec, 1, 101)
    _go_on(spec, batch.extract(1), [_aged(spec, 1, 101)], "an extracted sequence", first=20)
    _go_on(spec, single, [expected], "a second extract of the same sequence")


def check_filter_extend_extract(spec: str) -> None:
    """Sequences leave and join a batch; each goes on as it would alone."""
    cache = new_cache(spec)
    batch = type(cache).merge([_aged(spec, seed, age) for seed, age in enumerate((300, 20, 131))])
    solos = [_aged(spec, seed, age) for seed, age in enumerate((300, 20, 131))]
    _go_on(spec, batch, solos, "a batch of three", first=20)
    batch.filter([2, 1])  # the longest leaves, the others change places
    solos = [solos[2], solos[1]]
    _go_on(spec, batch, solos, "a filtered batch")
    batch.extend(type(cache).merge([_aged(spec, 8, 260), _aged(spec, 9, 0)]))
    solos += [_aged(spec, 8, 260), _aged(spec, 9, 0)]
    _go_on(spec, batch, solos, "an extended batch", first=40)
    batch.filter(mx.array([3, 0, 2]))
    solos = [solos[3], solos[0], solos[2]]
    _go_on(spec, batch, solos, "a batch filtered by an array")
    for index, solo in enumerate(solos):
        single = batch.extract(index)
        right = solo.offset
        expect(single.offset == right, spec, f"an extracted offset must be {right}, got {single.offset}")
        _go_on(spec, single, [solo], "an extracted sequence", first=30)


def check_right_padded_prompts(spec: str) -> None:
    """Prompts padded on the right to one length are held without the padding and answered as alone."""
    for borders in ((max(_PROMPTS),), (60, 80, 50)):
        prompts = [random_tokens(seed, n) for seed, n in enumerate(_PROMPTS)]
        batch, solos = (
            type(new_cache(spec)).merge([new_cache(spec) for _ in prompts]),
            [new_cache(spec) for _ in prompts],
        )
        batch.prepare(lengths=list(_PROMPTS), right_padding=[max(_PROMPTS) - n for n in _PROMPTS])
        padded, done = pad(prompts), 0
        for n in borders:
            output = step(batch, padded[done : done + n])
            for b, (solo, prompt) in enumerate(zip(solos, prompts, strict=True)):
                part = prompt[done : done + n]
                if part.count:
                    _close(spec, output[b : b + 1, :, : part.count], step(solo, part), "a right-padded prompt")
            done += n
        batch.finalize()
        _go_on(spec, batch, solos, "right-padded prompts")


def check_left_padded_prompts(spec: str) -> None:
    """Prompts padded on the left to one length are held without the padding and answered as alone."""
    prompts = [random_tokens(seed, n) for seed, n in enumerate(_PROMPTS)]
    batch, solos = type(new_cache(spec)).merge([new_cache(spec) for _ in prompts]), [new_cache(spec) for _ in prompts]
    batch.prepare(left_padding=[max(_PROMPTS) - n for n in _PROMPTS])
    output = step(batch, pad(prompts, left=True))
    for b, (solo, prompt) in enumerate(zip(solos, prompts, strict=True)):
        _close(spec, output[b : b + 1, :, -prompt.count :], step(solo, prompt), "a left-padded prompt")
    _go_on(spec, batch, solos, "left-padded prompts")


def _aged(spec: str, seed: int, age: int) -> CompressedKVCache:
    """Return a cache that has seen a prompt and a few tokens of an answer, `age` tokens in all."""
    cache = new_cache(spec)
    if age:
        feed(cache, random_tokens(100 + seed, age), [age - 3, 1, 1, 1])
    return cache


def _go_on(spec: str, batch: CompressedKVCache, solos: Sequence[CompressedKVCache], what: str, first: int = 1) -> None:
    """Give a batch and its sequences' solo caches the same tokens, and compare answers and what is held."""
    for n in (first, 1, 1, 1):
        tokens = [random_tokens(1000 * b + int(solo.size()), n) for b, solo in enumerate(solos)]
        together = Tokens(*(mx.concatenate([getattr(t, f) for t in tokens]) for f in ("queries", "keys", "values")))
        output = step(batch, together)
        for b, solo in enumerate(solos):
            _close(spec, output[b : b + 1], step(solo, tokens[b]), f"sequence {b} of {what}")
    offsets = batch.offset if isinstance(batch.offset, int) else batch.offset.tolist()
    alone = [solo.offset for solo in solos]
    expect(offsets in (alone, alone[0]), spec, f"{what}: offsets must be {alone}, got {offsets}")
    batch.store.settle()
    for b, solo in enumerate(solos):
        solo.store.settle()
        held, right = contents(batch.store)[b], contents(solo.store)[0]
        differing = sorted(name for name in held.keys() | right.keys() if held.get(name) != right.get(name))
        expect(not differing, spec, f"sequence {b} of {what} holds other {differing} than it would alone")


def _close(spec: str, got: mx.array, right: mx.array, what: str) -> None:
    error = float(mx.abs(got - right).max())
    expect(error < _TOLERANCE, spec, f"{what} is answered with an error of {error} against running alone")
