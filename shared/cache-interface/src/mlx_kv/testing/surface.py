"""What a cache shows: its attributes, its counters, its masks, and what it refuses."""

from __future__ import annotations

import _thread
import threading
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ..cache import CompressedKVCache
from .driving import (
    ConformanceError,
    Tokens,
    exact_attention,
    expect,
    feed,
    new_cache,
    random_tokens,
    reachable,
    reachable_arrays,
    same_bits,
    step,
    to_numpy,
)

_FORBIDDEN = {
    "bits": "mlx-lm would route the cache to its own quantised attention",
    "to_quantized": "mlx-lm would convert the cache",
    "__len__": "mlx-lm writes `if cache and ...`",
    "__bool__": "mlx-lm writes `if cache and ...`",
}
_PROPERTIES = ("offset", "nbytes", "state", "keys")
_CALLED_BY_MODELS = ("update_and_fetch", "make_mask", "attend")
_CALLED_BY_GENERATORS = ("trim", "is_trimmable", "size", "empty", "keys_and_values", "from_state")
_CALLED_BY_BATCHES = ("merge", "filter", "extend", "extract", "prepare", "finalize")
_LOCKS = (_thread.LockType, _thread.RLock, threading.Condition, threading.Event, threading.Semaphore)


def check_attributes(spec: str) -> None:
    """Every name of mlx-lm's protocol is there, and none that changes how mlx-lm treats a cache."""
    cache = new_cache(spec)
    for name, why in _FORBIDDEN.items():
        expect(not hasattr(type(cache), name) and not hasattr(cache, name), spec, f"must not have {name}: {why}")
    for name in (*_PROPERTIES, *_CALLED_BY_MODELS, *_CALLED_BY_GENERATORS, *_CALLED_BY_BATCHES):
        expect(hasattr(cache, name), spec, f"misses {name}, which mlx-lm's cache protocol has")
    feed(cache, random_tokens(0, 100), [99, 1])
    locks = [type(item).__name__ for item in reachable(cache) if isinstance(item, _LOCKS)]
    expect(not locks, spec, f"holds {locks}: mlx-lm deep-copies caches, and locks cannot be copied")


def check_counters(spec: str) -> None:
    """`offset` and `size` count the tokens seen, whatever is held of them."""
    cache, seen = new_cache(spec), 0
    expect(cache.empty() and cache.offset == 0 and cache.nbytes == 0, spec, "a new cache must be empty")
    for n in (70, 1, 1, 3, 200, 1):
        step(cache, random_tokens(n, n))
        seen += n
        expect(cache.offset == seen, spec, f"offset must count the {seen} tokens seen, got {cache.offset}")
        expect(cache.size() == seen, spec, f"size() must count the {seen} tokens seen, got {cache.size()}")
        expect(not cache.empty(), spec, f"a cache that has seen {seen} tokens must not be empty")


def check_masks(spec: str) -> None:
    """`make_mask` answers as an uncompressed cache would: layers with mlx-lm's own caches use the same mask."""
    solo, own = new_cache(spec), KVCache()
    left = [5, 0]
    batch, own_batch = new_cache(spec), BatchKVCache(left)
    batch.prepare(left_padding=left)
    for n in (40, 1, 7):
        for window in (None, 16):
            for size in (1, 2, 9):
                expected = own.make_mask(size, return_array=False, window_size=window)
                _same_mask(spec, solo.make_mask(size, window_size=window), expected)
                expected = own_batch.make_mask(size, window_size=window)
                _same_mask(spec, batch.make_mask(size, window_size=window), expected)
                expected = own.make_mask(size, return_array=True, window_size=window)
                _same_mask(spec, solo.make_mask(size, return_array=True, window_size=window), expected)
        tokens = random_tokens(n, n)
        step(solo, tokens)
        own.update_and_fetch(tokens.keys, tokens.values)
        both = Tokens(*(mx.concatenate([x, x]) for x in (tokens.queries, tokens.keys, tokens.values)))
        step(batch, both)
        own_batch.update_and_fetch(both.keys, both.values)
        offsets = batch.offset
        expect(isinstance(offsets, mx.array), spec, "a batch's offset must be an array [batch]")
        expected = cast("list[int]", own_batch.offset.tolist())
        expect(mx.array(offsets).tolist() == expected, spec, f"offsets must be {expected}, got {offsets}")


def check_attention(spec: str) -> None:
    """Every chunk attends to the rows held and, in full precision, to itself."""
    cache = new_cache(spec)
    for seed, n in enumerate((90, 1, 1, 40, 1, 170, 1, 1)):
        tokens = random_tokens(seed, n)
        keys, values = tokens.keys, tokens.values
        if not cache.empty():
            held = cache.keys_and_values()
            keys, values = mx.concatenate([held[0], keys], axis=2), mx.concatenate([held[1], values], axis=2)
        expected = exact_attention(to_numpy(tokens.queries), to_numpy(keys), to_numpy(values))
        error = abs(to_numpy(step(cache, tokens)) - expected).max()
        # float32 against float64; outputs are of the order of 1.
        expect(error < 1e-4, spec, f"a chunk of {n} tokens after {cache.size() - n} is attended to with error {error}")


def check_foreign_arrays_are_refused(spec: str) -> None:
    """A model that changes keys or values after update_and_fetch is told so instead of being answered wrongly."""
    cache = new_cache(spec)
    tokens = random_tokens(0, 8)
    keys, values = cache.update_and_fetch(tokens.keys, tokens.values)
    expect(
        keys.shape == tokens.keys.shape and values.shape == tokens.values.shape,
        spec,
        f"update_and_fetch must return an uncompressed cache's shapes, got {keys.shape} and {values.shape}",
    )
    try:
        cache.attend(tokens.queries, keys * 2, values, 1.0, None)
    except ValueError:
        return
    raise ConformanceError(f"[{spec}] attend must refuse keys that update_and_fetch did not return")


def check_caches_share_nothing(spec: str) -> None:
    """Two caches of one spec have no array and no container in common, and do not see each other's tokens."""
    first, second = new_cache(spec), new_cache(spec)
    tokens = random_tokens(0, 150)
    expected = feed(new_cache(spec), tokens, [149, 1])
    feed(first, random_tokens(1, 200), [199, 1])
    expect(second.empty(), spec, "a cache is not empty after another one was fed")
    output = feed(second, tokens, [149, 1])
    expect(same_bits(output, expected), spec, "a cache answers differently after another one was fed")
    common = {id(a) for a in reachable_arrays(first)} & {id(a) for a in reachable_arrays(second)}
    expect(not common, spec, f"two caches share {len(common)} arrays")
    first_mutable, second_mutable = _containers(first), _containers(second)
    expect(not first_mutable & second_mutable, spec, "two caches share a list, dict or set")


def _containers(cache: CompressedKVCache) -> set[int]:
    """Return the ids of every list, dict and set that can be reached."""
    return {id(item) for item in reachable(cache) if type(item) in (list, dict, set)}


def _same_mask(spec: str, got: object, expected: object) -> None:
    if isinstance(expected, mx.array):
        same = isinstance(got, mx.array) and mx.array_equal(got, expected).item()
    else:
        same = got is expected or got == expected
    expect(same, spec, f"make_mask must answer as an uncompressed cache does: expected {expected}, got {got}")
