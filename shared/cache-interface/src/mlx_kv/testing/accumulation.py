"""The reference of policies that add up attention: every row is stored, and dropped by definition, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from ..accumulation import AccumulatingPolicy, Kept
from ..cache import CompressedKVCache
from ..spec import Spec
from ..store import Geometry
from .driving import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

NEAR = 1e-5
"""Scores that differ by less than this share may be exchanged by float32; equal ones may not."""


@dataclass
class Simulator:
    """One sequence of one layer: all keys ever seen, and the positions and scores that each KV head holds."""

    kv_heads: int
    kept: Callable[[int], Kept | tuple[int, int] | None]
    """Rows to keep, and newest among them, after a prompt that ended with so many tokens."""
    temperature: Callable[[int], float] = lambda step: 1.0
    noise: Callable[[int, int], float] | None = None
    """Of a query head and a position."""
    every_chunk: bool = False
    keys: list[Floats] = field(default_factory=list["Floats"])
    """[kv_heads, key_dim] of every token."""
    held: list[list[int]] = field(init=False)
    """Positions in each KV head."""
    near: list[set[int]] = field(init=False)
    """Positions on both sides of each head's last cut whose scores are near it, but not equal to each other."""
    scores: list[dict[int, float]] = field(init=False)
    """By position, in each KV head; those of dropped rows stay as they were."""
    armed: bool = False
    tokens: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        """Start with nothing."""
        self.held = [[] for _ in range(self.kv_heads)]
        self.near = [set() for _ in range(self.kv_heads)]
        self.scores = [{} for _ in range(self.kv_heads)]

    def step(self, queries: Floats, keys: Floats, scale: float, sinks: Floats | None = None) -> None:
        """See a chunk: queries [query_heads, n, key_dim], keys [kv_heads, n, key_dim]."""
        count, first = keys.shape[1], len(self.keys)
        self.keys += [keys[:, i] for i in range(count)]
        ended = count == 1 and self.armed
        self.armed = count > 1
        self.steps = 0 if count > 1 or ended or not first else self.steps + 1
        if ended or (count > 1 and self.every_chunk):
            self.tokens = len(self.keys)
        group = len(queries) // self.kv_heads
        for head in range(self.kv_heads):
            own = queries[head * group : (head + 1) * group]
            self.held[head] += range(first, first + count)
            self._add(head, own, first, scale, None if sinks is None else sinks[head * group : (head + 1) * group])
            self.near[head] = set()
            if count == 1 or self.every_chunk:
                self._drop(head)

    def _add(self, head: int, queries: Floats, first: int, scale: float, sinks: Floats | None) -> None:
        positions = np.array(self.held[head])
        rows = np.array([self.keys[p][head] for p in self.held[head]], np.float64)
        tau, added = self.temperature(self.steps), np.zeros(len(positions))
        for g, of_head in enumerate(queries):
            extra = np.zeros(len(rows))
            if self.noise is not None:
                extra = np.array([self.noise(head * len(queries) + g, int(p)) for p in positions])
            for i, query in enumerate(of_head):
                logits = np.where(positions <= first + i, (scale * rows @ query + extra) / tau, -np.inf)
                sink = -np.inf if sinks is None else sinks[g] / tau
                largest = max(logits.max(), sink)
                weights = np.exp(logits - largest)
                added += weights / (weights.sum() + np.exp(sink - largest)) / len(queries)
        for position, score in zip(positions.tolist(), added.tolist(), strict=True):
            self.scores[head][position] = self.scores[head].get(position, 0.0) + score

    def _drop(self, head: int) -> None:
        kept, held, scores = self.kept(self.tokens), self.held[head], self.scores[head]
        if kept is None or len(held) <= kept[0]:
            return
        window = [p for p in held if p >= len(self.keys) - kept[1]]
        others = sorted((p for p in held if p < len(self.keys) - kept[1]), key=lambda p: (-scores[p], p))
        cut = kept[0] - len(window)
        inside, outside = scores[others[cut - 1]], scores[others[cut]]
        if 0 < inside - outside < NEAR * inside:
            self.near[head] = {p for p in others if abs(scores[p] - inside) < 2 * NEAR * inside}
        self.held[head] = sorted(others[:cut]) + window


@dataclass
class Decisions:
    """How often a head's rows were compared, and how often float32 could not be expected to agree."""

    compared: int = 0
    near: int = 0


def compare_walk(
    spec: str,
    simulate: Callable[[int], Simulator],
    *,
    group: int = 2,
    batch: int = 1,
    steps: int = 200,
    seed: int = 0,
    sinks: bool = False,
    dim: int = 16,
) -> Decisions:
    """Drive a policy over dense rows and a simulator through the same random chunks; after each the rows are equal.

    Sequences of a batch have seen prompts of different lengths when they are merged. A cut between near scores counts
    as such, and the simulator goes on with what the policy holds.

    Args:
        spec: a policy that adds up attention.
        simulate: returns the simulator of a number of KV heads.
        group: query heads for each KV head, of which there are two.
        batch: sequences.
        steps: chunks, most of them of one token.
        seed: of all that is random.
        sinks: give the heads attention sinks.
        dim: channels of a head.

    Raises:
        ConformanceError: if other rows are held than the simulator's.
    """
    rng, decisions, kv_heads = np.random.default_rng(seed), Decisions(), 2
    policy, store = Spec.parse(spec).create(Geometry(3, group * kv_heads, kv_heads, dim, dim))
    extra = rng.standard_normal(group * kv_heads).astype(np.float32) if sinks else None

    def feed(cache: CompressedKVCache, simulators: list[Simulator], count: int) -> None:
        shapes = ((group * kv_heads, count, dim), (kv_heads, count, dim), (kv_heads, count, dim))
        queries, keys, values = (rng.standard_normal((len(simulators), *shape)).astype(np.float32) for shape in shapes)
        mask = cache.make_mask(count)
        returned = cache.update_and_fetch(mx.array(keys), mx.array(values))
        output = cache.attend(mx.array(queries), *returned, dim**-0.5, mask, None if extra is None else mx.array(extra))
        mx.eval(output)
        exact = None if extra is None else extra.astype(np.float64)
        for b, simulator in enumerate(simulators):
            simulator.step(queries[b].astype(np.float64), keys[b].astype(np.float64), dim**-0.5, exact)
        _compare(spec, cache, simulators, decisions)

    caches = [CompressedKVCache(policy.fresh(), store.fresh()) for _ in range(batch)]
    simulators = [simulate(kv_heads) for _ in range(batch)]
    for cache, simulator in zip(caches, simulators, strict=True):
        for n in (*rng.integers(2, 30, 2).tolist(), 1):
            feed(cache, [simulator], n)
    cache = caches[0] if batch == 1 else CompressedKVCache.merge(caches)
    for _ in range(steps):
        feed(cache, simulators, int(rng.integers(2, 20)) if rng.random() < 0.1 else 1)
    return decisions


def _compare(spec: str, cache: CompressedKVCache, simulators: list[Simulator], decisions: Decisions) -> None:
    policy = cast("AccumulatingPolicy", cache.policy)
    cache.store.settle()
    keys = np.array(cast(Any, cache.store.dense()[0]))
    places = np.array(cast(Any, policy.positions.view()))[..., 0]
    for b, simulator in enumerate(simulators):
        rows = cache.store.lengths[b]
        expect(policy.positions.lengths[b] == rows, spec, f"{rows} rows have {policy.positions.lengths[b]} positions")
        for head in range(simulator.kv_heads):
            held: list[int] = places[b, head, :rows].tolist()
            expected, near = simulator.held[head], simulator.near[head]
            decisions.compared += 1
            decisions.near += bool(near)
            other = set(held) ^ set(expected)
            expect(len(held) == len(expected) and other <= near, spec, f"holds {sorted(held)}, expected {expected}")
            simulator.held[head] = sorted(held)
            same = np.array_equal(keys[b, head, :rows], np.array([simulator.keys[p][head] for p in held], np.float32))
            expect(same, spec, "the keys held are not those of the positions")
