"""Taking tokens back, copying, saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..cache import CompressedKVCache
from ..spec import Spec
from .driving import ConformanceError, contents, expect, feed, new_cache, random_tokens, same_bits, step


def check_trimmable(spec: str) -> None:
    """The empty cache is trimmable exactly when no row is evicted and the store can take rows back."""
    cache = new_cache(spec)
    promised = not cache.policy.evicts and cache.store.rollback != 0
    trimmable = cache.is_trimmable()
    expect(trimmable is promised, spec, f"is_trimmable() of an empty cache must be {promised}, got {trimmable}")


def check_trim(spec: str) -> None:
    """A trim within rollback equals never having seen the tokens, bit for bit; a larger one raises and does nothing."""
    reach = new_cache(spec).rollback
    most = 100 if reach is None else reach
    for seed, kept in enumerate((40, 128, 261)):
        for back in sorted({most, min(most, 3)} - {0}):
            for chunks in ([back], [1] * back):
                _trim_once(spec, seed, kept, back, chunks)
    if reach is not None:
        _refuses(spec, reach)


def _trim_once(spec: str, seed: int, kept: int, back: int, chunks: list[int]) -> None:
    tokens, wrong, later = random_tokens(seed, kept), random_tokens(seed + 50, back), random_tokens(seed + 90, 73)
    never, taken = new_cache(spec), new_cache(spec)
    for cache in (never, taken):
        feed(cache, tokens, [kept - 1, 1])
    feed(taken, wrong, chunks)
    told = taken.trim(back)
    expect(told == back, spec, f"trim({back}) must return {back}, got {told}")
    what = f"after {kept} tokens, {back} more and trim({back})"
    expect(taken.offset == kept, spec, f"{what} offset must be {kept}, got {taken.offset}")
    for name, a, b in zip(("keys", "values"), taken.keys_and_values(), never.keys_and_values(), strict=True):
        expect(same_bits(a, b), spec, f"{what} the {name} differ from those of a cache that never saw the {back}")
    for n in (1, 71, 1):
        same = same_bits(step(taken, later[:n]), step(never, later[:n]))
        expect(same, spec, f"{what} the next tokens are answered differently")
        later = later[n:]


def _refuses(spec: str, reach: int) -> None:
    cache, unharmed = new_cache(spec), new_cache(spec)
    for each in (cache, unharmed):
        feed(each, random_tokens(1, 300), [299, 1])
    try:
        cache.trim(reach + 1)
    except ValueError:
        pass
    else:
        raise ConformanceError(f"[{spec}] trim({reach + 1}) goes beyond rollback={reach} and must raise ValueError")
    token = random_tokens(2, 1)
    same = cache.offset == 300 and same_bits(step(cache, token), step(unharmed, token))
    expect(same, spec, "a refused trim must change nothing")


def check_copies_are_independent(spec: str) -> None:
    """A deep copy and a cache rebuilt from `state` go on as the original does, and none sees another's tokens."""
    makers: tuple[tuple[str, Callable[[CompressedKVCache], CompressedKVCache]], ...] = (
        ("a deep copy", copy.deepcopy),
        ("a cache rebuilt from state", lambda cache: type(cache).from_state(cache.state)),
    )
    futures = [random_tokens(60, 180), random_tokens(61, 180)]
    for name, make in makers:
        for seen in ([299, 1], [120]):
            cache, expected = new_cache(spec), list[mx.array]()
            feed(cache, random_tokens(1, sum(seen)), seen)
            for future in futures:
                fresh = new_cache(spec)
                feed(fresh, random_tokens(1, sum(seen)), seen)
                expected.append(feed(fresh, future, [1, 1, 60, 117, 1]))
            other = make(cache)
            expect(type(other) is type(cache), spec, f"{name} is a {type(other).__name__}")
            expect(other.nbytes <= cache.nbytes, spec, f"{name} holds {other.nbytes} bytes, not {cache.nbytes}")
            # In turns, so that a shared array would be written to by both.
            outputs: list[list[mx.array]] = [[], []]
            done = 0
            for n in (1, 1, 60, 117, 1):
                for each, future, output in zip((cache, other), futures, outputs, strict=True):
                    output.append(step(each, future[done : done + n]))
                done += n
            for which, output, right in zip(("the original", name), outputs, expected, strict=True):
                same = same_bits(mx.concatenate(output, axis=2), right)
                expect(same, spec, f"{which} goes on differently once both the original and {name} are used")


def check_five_reloads(spec: str) -> None:
    """Five turns of saving and loading leave every array as it was."""
    cache, never = new_cache(spec), new_cache(spec)
    for turn, n in enumerate((200, 1, 1, 77, 140)):
        for each in (cache, never):
            step(each, random_tokens(turn, n))
        reloaded = type(cache).from_state(_through_bytes(cache.state))
        changed = contents(reloaded.store) != contents(cache.store)
        expect(not changed, spec, f"reload {turn + 1} changed the arrays held")
        expect(reloaded.offset == cache.offset, spec, f"reload {turn + 1} changed offset to {reloaded.offset}")
        cache = reloaded
    token = random_tokens(9, 1)
    same = same_bits(step(cache, token), step(never, token))
    expect(same, spec, "after five reloads the next token is answered differently")
    expect(str(Spec.parse(cache.method)) == cache.method, spec, f"the saved spec {cache.method} does not read back")


def _through_bytes(state: Any) -> Any:
    """Return a state whose arrays have been outside MLX, as a file's have."""
    if isinstance(state, mx.array):
        return mx.array(np.array(mx.contiguous(state).view(mx.uint8))).view(state.dtype)
    if isinstance(state, dict):
        return {name: _through_bytes(value) for name, value in cast("dict[str, Any]", state).items()}
    if isinstance(state, list | tuple):
        return [_through_bytes(value) for value in cast("list[Any]", state)]
    return state
