"""What a cache holds: codes that do not depend on the calls, and bytes that are what it says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from .driving import (
    GEOMETRY,
    Tokens,
    contents,
    expect,
    feed,
    new_cache,
    new_store,
    random_tokens,
    reachable_arrays,
    same_bits,
    step,
)

_CHUNKINGS: tuple[tuple[int, ...], ...] = ((350,), (1,) * 350, (128, 128, 94), (64,) * 5 + (30,), (33, 1, 200, 5, 111))
# An array's allocation is rounded up to pages of at most 16 KiB.
_PAGE = 1 << 14


def check_chunking_does_not_matter(spec: str) -> None:
    """The same rows appended at once, in any chunks or one at a time end in identical arrays, row for row."""
    tokens = random_tokens(3, 350)
    expected: list[dict[str, bytes]] = []
    for chunks in _CHUNKINGS:
        store, done = new_store(spec), 0
        for n in chunks:
            store.append(tokens.keys[:, :, done : done + n], tokens.values[:, :, done : done + n])
            store.settle()
            done += n
        # A step of one token ends whatever a store calls a prompt.
        last = random_tokens(4, 1)
        store.append(last.keys, last.values)
        store.settle()
        held = contents(store)
        expected = expected or held
        differing = sorted(name for name in expected[0] if held[0].get(name) != expected[0][name])
        expect(not differing, spec, f"appending {_shortly(chunks)} rows holds other {differing} than at once")


def check_new_rows_are_exact(spec: str) -> None:
    """Until a store settles, the rows of the chunk in hand are exact, at every length."""
    store = new_store(spec)
    for seed, n in enumerate((*range(1, 20), 64, 1, 128, 1, 300, 1)):
        tokens = random_tokens(seed, n)
        store.append(tokens.keys, tokens.values)
        for name, given, held in zip(("keys", "values"), (tokens.keys, tokens.values), store.dense(), strict=True):
            rows = sum(store.lengths)
            expect(held.shape[2] == rows, spec, f"dense() must give {rows} rows, got {held.shape[2]} {name}")
            expect(same_bits(held[:, :, -n:], given), spec, f"the newest {n} {name} of {rows} are not exact")
        store.settle()


def check_nbytes(spec: str) -> None:
    """`nbytes` is the sum over every array that the cache can reach, and what MLX has allocated for it."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = new_cache(spec)
    for seed, n in enumerate((1, 100, 1, 1, 500, 1, 700)):
        step(cache, random_tokens(seed, n))
        told = cache.nbytes
        arrays = reachable_arrays(cache)
        mx.eval(arrays)
        held = sum(array.nbytes for array in arrays)
        expect(told == held, spec, f"nbytes says {told}, the arrays that the cache reaches hold {held}")
    gc.collect()
    allocated = mx.get_active_memory() - before
    told, slack = cache.nbytes, _PAGE * len(reachable_arrays(cache))
    expect(abs(allocated - told) <= 0.05 * told + slack, spec, f"nbytes says {told}, MLX has allocated {allocated}")


def check_bytes_follow_length(spec: str) -> None:
    """A batch holds what its sequences would hold alone, not what the longest would as often."""
    lengths = (1500, 20, 700, 60)
    solos = [new_cache(spec) for _ in lengths]
    for seed, (cache, n) in enumerate(zip(solos, lengths, strict=True)):
        feed(cache, random_tokens(seed, n), [n - 1, 1])
    batch = type(solos[0]).merge(solos)
    alone, together = sum(cache.nbytes for cache in solos), batch.nbytes
    # A step of growth for each sequence and array, and as much again of air between the sequences of a batch.
    row = 4 * GEOMETRY.kv_heads * (GEOMETRY.key_dim + GEOMETRY.value_dim)
    slack = 256 * row * len(lengths)
    expect(together <= alone + slack, spec, f"sequences of {lengths} hold {alone} bytes alone, {together} in a batch")
    batch.filter([1, 3])
    few = solos[1].nbytes + solos[3].nbytes + 2 * 256 * row
    expect(batch.nbytes <= few, spec, f"the long sequences are gone, the batch still holds {batch.nbytes} bytes")


def check_memory_is_flat(spec: str) -> None:
    """500 steps of one token allocate nothing but the growth of the arrays held: no step's graph is kept alive."""
    gc.collect()  # what others have left must not go meanwhile
    cache = new_cache(spec)
    step(cache, random_tokens(0, 300))
    token = random_tokens(1, 1)
    beside: list[int] = []
    for _ in range(500):
        step(cache, token)
        beside.append(mx.get_active_memory() - sum(array.nbytes for array in reachable_arrays(cache)))
    # A page per array comes and goes with the arrays' sizes; a graph kept alive takes more at every single step.
    slack = _PAGE * len(reachable_arrays(cache))
    grown = beside[-1] - min(beside[:20])
    expect(grown <= slack, spec, f"500 steps left {grown} bytes behind beside the arrays held")
    # MLX's threads let go of the last step's buffers in their own time, so single readings go up and down.
    floors = [min(beside[first : first + 50]) for first in range(0, 500, 50)]
    rises = sum(later > earlier for earlier, later in pairwise(floors))
    expect(rises < 8, spec, f"memory beside the arrays held grew all the way, every 50 steps its least was {floors}")


def check_take(spec: str) -> None:
    """`take` keeps the chosen rows of each head and sequence, in order."""
    store = new_store(spec)
    tokens = [random_tokens(5, 200), random_tokens(6, 200)]
    both = Tokens(*(mx.concatenate([getattr(t, name) for t in tokens]) for name in ("queries", "keys", "values")))
    store.append(both.keys, both.values, [(0, 200), (0, 150)])
    store.settle()
    chosen = [[[0, 5, 40, 41, 149], [1, 2, 3, 4, 149]], [[7, 8, 148, 0, 0], [0, 100, 149, 0, 0]]]
    before = store.dense()
    store.take(mx.array(chosen), [5, 3])
    expect(store.lengths == [5, 3], spec, f"take must leave the rows asked for, [5, 3], got {store.lengths}")
    for name, old, new in zip(("keys", "values"), before, store.dense(), strict=True):
        for b, n in enumerate((5, 3)):
            for head in range(GEOMETRY.kv_heads):
                wanted = old[b, head, mx.array(chosen[b][head][:n])]
                # So few rows are held exactly by every store: nothing is rounded again.
                same = same_bits(new[b, head, :n], wanted)
                expect(same, spec, f"take left other {name} in head {head} of sequence {b} than the rows asked for")


def _shortly(chunks: Sequence[int]) -> str:
    return f"{len(chunks)} times {chunks[0]}" if len(set(chunks)) == 1 else " + ".join(map(str, chunks))
