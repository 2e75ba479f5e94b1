"""Policies that keep the rows with the most attention so far, at every step: what H2O and Keyformer have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import mlx.core as mx

from mlx_kv_kernels import resolve_backend, topk_rows
from mlx_kv_kernels.accumulate import Noise, Step, accumulate_held, row_noise
from mlx_kv_kernels.window import window_scores

from .exchange import exchange
from .policy import Attended, Policy, PromptEnd
from .rows import RowBuffer
from .store import Geometry, Store

BLOCK = 32
"""Rows over budget at which rows are dropped from a store whose rows cannot change places, and must be copied."""


class Kept(NamedTuple):
    """How many rows a sequence keeps."""

    rows: int
    recent: int
    """Newest tokens among them, which are kept whatever their score."""


@dataclass(frozen=True)
class AccumulationOptions(ABC):
    """The options of such a policy; a method's config derives from it."""

    kind: ClassVar[str] = "policy"

    every_chunk: bool = False
    """Hold to the budget after every chunk of a prompt, not only from its end on: bounds the peak, selects early."""

    @abstractmethod
    def kept(self, tokens: int) -> Kept | None:
        """Return what is kept once a prompt has ended with the sequence's token number `tokens`.

        0 stands for no prompt yet; None keeps all rows.
        """

    def temperature(self, step: int) -> float:
        """Return what logits are divided by: `step` is 0 for a prompt, then counts the tokens after it."""
        return 1.0

    def noise_on(self, layer: int) -> Noise | None:
        """Return the noise on one layer's logits."""
        return None


class AccumulatingPolicy(Policy):
    """Adds up the attention that each row gets, and drops the lowest sums at a prompt's end and every step after it.

    The sums and positions of rows stand in the order of the store's rows. Where the store lets rows change places, a
    step over budget drops one row of each head and the newest takes its place. Else rows stay in ascending position and
    up to BLOCK - 1 rows more than the budget are held, so that copying the rest happens once in BLOCK steps.
    """

    evicts = True
    evicts_while_decoding = True
    evicts_every_step = True
    needs_logits = True

    def __init__(self, options: AccumulationOptions, geometry: Geometry) -> None:
        """Make the policy of one layer, which has seen nothing."""
        self.options = options
        self.noise = options.noise_on(geometry.layer)
        self.kv_heads = geometry.kv_heads
        self._forget(0)

    def decode(self, queries: mx.array, store: Store, scale: float, sinks: mx.array | None) -> mx.array | None:
        """Take a token of the only sequence, whose budget is full, as one function: what decoding does at each step."""
        kept = self._exchanging
        if kept is None or self.scores.begins[0] or store.lengths != [kept.rows + 1]:
            return None
        seen, steps, scores, positions = self.seen[0] + 1, self.steps[0] + 1, self.scores, self.positions
        tau, window = self.options.temperature(steps), seen - kept.recent
        step = Step(0, kept.rows + 1, scores.limits[0], seen - 1, window, True, tau)
        held = cast("mx.array", scores.data), cast("mx.array", positions.data)
        exchanged = exchange(store, kept.recent, queries, scale, sinks, *held, step, self.noise)
        if exchanged is None:
            return None
        output, scores.data, positions.data, overdue, taken = exchanged
        self.seen, self.steps = [seen], [steps]
        store.exchanged(overdue, taken)
        return output

    def observe(self, chunk: Attended) -> bool:
        """Add a chunk's attention to the sums, and drop rows where a prompt has ended or an answer goes on."""
        if not self.seen:
            self._forget(len(chunk.spans))
        counts = [last - first for first, last in chunk.spans]
        scored = [held + n for held, n in zip(self.scores.lengths, counts, strict=True)]
        if chunk.store.lengths != scored:
            raise ValueError(
                f"[mlx_kv] expected {scored} rows, got {chunk.store.lengths}: tokens have been appended whose "
                "attention was never computed; make a new cache"
            )
        before, self.seen = self.seen, [seen + n for seen, n in zip(self.seen, counts, strict=True)]
        ended = self.prompt.advance(chunk.spans)
        for b, n in enumerate(counts):
            starts = n > 1 or ended[b] or not before[b]
            self.steps[b] = 0 if starts else self.steps[b] + n
            if ended[b] or (n > 1 and self.options.every_chunk):
                self.tokens[b] = self.seen[b]
        over = [self._over(b, n, chunk.store.lengths[b]) for b, n in enumerate(counts)]
        self._exchanging = None
        if chunk.logits is None:
            self._add_chunk(chunk, before)
            replaced: list[int] = []
        else:
            replaced = [b for b, n in enumerate(over) if n == 1 and chunk.store.replaces]
            dropped = self._add_token(chunk, chunk.logits, counts, replaced)
            if replaced:
                of_replaced = dropped if len(replaced) == len(counts) else dropped[mx.array(replaced)]
                chunk.store.replace(replaced, of_replaced)
            if len(counts) == len(replaced) == 1:
                self._exchanging = self.options.kept(self.tokens[0])
        waits = [n == 1 and not end and not chunk.store.replaces for n, end in zip(counts, ended, strict=True)]
        least = [BLOCK if wait else 1 for wait in waits]
        due = [b for b, n in enumerate(over) if n >= least[b] and b not in replaced]
        if due:
            self._compact(chunk, due)
        return any(counts)

    def _over(self, sequence: int, count: int, held: int) -> int:
        """Return how many rows a sequence holds over its budget, 0 if it may hold them now."""
        kept = self.options.kept(self.tokens[sequence])
        if kept is None or count == 0 or (count > 1 and not self.options.every_chunk):
            return 0
        return max(held - kept.rows, 0)

    def _window(self, sequence: int) -> int:
        """Return the position of the first of the newest tokens, which are kept."""
        kept = self.options.kept(self.tokens[sequence])
        return self.seen[sequence] - (kept.recent if kept else 0)

    def _add_chunk(self, chunk: Attended, before: Sequence[int]) -> None:
        """Add the attention of several tokens of each sequence, computed anew."""
        keys, (batch, query_heads, width, _) = chunk.store.dense()[0], chunk.queries.shape
        spans, shape = chunk.spans, (batch, self.kv_heads, width, 1)
        starts = mx.array([seen - first for seen, (first, _) in zip(before, spans, strict=True)])
        places = starts[:, None, None, None] + mx.arange(width)[:, None]
        self.scores.append(mx.zeros(shape), spans)
        self.positions.append(mx.broadcast_to(places, shape).astype(mx.int32), spans)
        scores, positions = cast("mx.array", self.scores.data), cast("mx.array", self.positions.data)
        for b, (first, last) in enumerate(spans):
            if first == last:
                continue
            own = slice(self.scores.begins[b], self.scores.ends[b])
            tau = self.options.temperature(self.steps[b])
            bias = None
            if self.noise is not None:
                bias = row_noise(self.noise, positions[0, :, own, 0], query_heads)[None] / tau
            added = window_scores(
                chunk.queries[b : b + 1, :, first:last],
                keys[b : b + 1, :, : chunk.store.lengths[b]],
                chunk.scale / tau,
                None if chunk.sinks is None else chunk.sinks / tau,
                bias,
            )
            scores[0, :, own, 0] += added[0]

    def _add_token(self, chunk: Attended, logits: mx.array, counts: Sequence[int], replaced: Sequence[int]) -> mx.array:
        """Add the attention of a token of each sequence, and return the rows that `replaced` sequences drop."""
        self.scores.reserve(counts, self.kv_heads, 1, mx.float32)
        self.positions.reserve(counts, self.kv_heads, 1, mx.int32)
        steps = [
            Step(
                self.scores.begins[b],
                chunk.store.lengths[b] if n else 0,
                self.scores.limits[b],
                self.seen[b] - 1,
                self._window(b),
                b in replaced,
                self.options.temperature(self.steps[b]),
            )
            for b, n in enumerate(counts)
        ]
        dropped = self._accumulate(logits, steps, chunk.sinks)
        held = [n - (b in replaced) for b, n in enumerate(counts)]
        self.scores.advance(held)
        self.positions.advance(held)
        return dropped

    def _accumulate(self, logits: mx.array, steps: Sequence[Step], sinks: mx.array | None) -> mx.array:
        """Add a token's attention to the sums, which have room for it, and return the rows dropped."""
        scores, positions = cast("mx.array", self.scores.data), cast("mx.array", self.positions.data)
        self.scores.data, self.positions.data, dropped = accumulate_held(
            logits, scores, positions, steps, sinks, self.noise, resolve_backend()
        )
        return dropped

    def _compact(self, chunk: Attended, due: Sequence[int]) -> None:
        """Bring some sequences to their budgets, in ascending position."""
        lengths = self.scores.lengths
        kept = [self.options.kept(self.tokens[b]) for b in range(len(lengths))]
        counts = [k.rows if k and b in due else n for b, (k, n) in enumerate(zip(kept, lengths, strict=True))]
        scores, positions = self.scores.view()[..., 0], self.positions.view()[..., 0]
        chosen: list[mx.array] = []
        for b, n in enumerate(counts):
            indices = mx.broadcast_to(mx.arange(n), (1, self.kv_heads, n))
            if b in due:
                own = scores[b : b + 1, :, : lengths[b]], positions[b : b + 1, :, : lengths[b]]
                indices = _select(*own, n, self._window(b))
            chosen.append(mx.pad(indices, [(0, 0), (0, 0), (0, max(counts) - n)]))
        chunk.store.take_from(due, mx.concatenate([chosen[b] for b in due]), [counts[b] for b in due])
        for buffer in (self.scores, self.positions):
            buffer.take(mx.concatenate(chosen), counts)

    def _forget(self, batch: int) -> None:
        self.prompt = PromptEnd([False] * batch)
        self.scores, self.positions = RowBuffer(), RowBuffer()
        for buffer in (self.scores, self.positions):
            buffer.clear(batch)
        self.seen = [0] * batch  # tokens of each sequence
        self.tokens = [0] * batch  # how many they were when its last prompt ended
        self.steps = [0] * batch  # tokens since then
        self._exchanging: Kept | None = None  # while each token of the only sequence takes the place of a row

    def fresh(self) -> Self:
        """Return a policy of the same configuration that has seen nothing."""
        return self.blank(0)

    def blank(self, batch: int) -> Self:
        """Return a policy of the same configuration with `batch` sequences that have seen nothing."""
        twin = copy(self)
        twin._forget(batch)
        return twin

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a policy with the state of these sequences."""
        chosen = self.fresh()
        chosen.prompt = PromptEnd([self.prompt.armed[b] for b in sequences])
        chosen.scores, chosen.positions = self.scores.select(sequences), self.positions.select(sequences)
        chosen.seen = [self.seen[b] for b in sequences]
        chosen.tokens = [self.tokens[b] for b in sequences]
        chosen.steps = [self.steps[b] for b in sequences]
        return chosen

    def extend(self, other: Self) -> None:
        """Append the state of another policy's sequences."""
        self._exchanging = None
        self.prompt = PromptEnd(self.prompt.armed + other.prompt.armed)
        self.scores.extend(other.scores)
        self.positions.extend(other.positions)
        self.seen, self.tokens, self.steps = (
            self.seen + other.seen,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )

    def arrays(self) -> dict[str, mx.array]:
        """Return the sums and positions of the rows held."""
        buffers = (("scores", self.scores), ("positions", self.positions))
        return {name: buffer.data for name, buffer in buffers if buffer.data is not None}

    def places(self) -> dict[str, Any]:
        """Return everything else."""
        return {
            "scores": self.scores.places,
            "positions": self.positions.places,
            "armed": self.prompt.armed,
            "seen": self.seen,
            "tokens": self.tokens,
            "steps": self.steps,
        }

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another policy's arrays and places."""
        self._exchanging = None
        self.scores.load(arrays.get("scores"), places["scores"])
        self.positions.load(arrays.get("positions"), places["positions"])
        self.prompt = PromptEnd(places["armed"])
        self.seen, self.tokens, self.steps = (list(places[name]) for name in ("seen", "tokens", "steps"))


def _select(scores: mx.array, positions: mx.array, budget: int, window: int) -> mx.array:
    """Return the rows [1, kv_heads, budget] to keep, those of the window among them, in ascending position."""
    ascending = mx.argsort(positions, axis=-1)
    scores, positions = (mx.take_along_axis(x, ascending, axis=-1) for x in (scores, positions))
    kept = topk_rows(mx.where(positions >= window, float("inf"), scores), budget)
    return mx.take_along_axis(ascending, kept, axis=-1).astype(mx.int32)
