"""Policies that select a prompt's rows by what its newest tokens look at: what SnapKV and PyramidKV have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlx_kv_kernels.pooling import POOLINGS, Pooling
from mlx_kv_kernels.window import select_window_rows

from .policy import Attended, Policy, PromptEnd
from .rows import RowBuffer


@dataclass(frozen=True)
class WindowOptions:
    """The options of such a policy, checked; a method's config derives from it and names itself in `method`.

    Raises:
        ValueError: if an option is out of its range.
    """

    kind: ClassVar[str] = "policy"
    method: ClassVar[str] = "window"

    budget: int | float = 1024
    """Rows to keep, the window included; a number between 0 and 1 is a share of the tokens seen."""
    window: int = 32
    """Newest rows, which are always kept; their queries vote on the others."""
    kernel_size: int = 7
    """Neighbouring rows that votes are pooled over; odd."""
    pooling: Pooling = "max"
    """How votes are pooled: max or avg."""
    sinks: int = 0
    """First rows, which are always kept, within the budget."""
    every_chunk: bool = False
    """Hold to the budget after every chunk of a prompt, not only at its end: bounds the peak, but selects too early."""
    decode_budget: int = 0
    """Rows to keep while decoding, selected anew every `interval` tokens; 0 keeps all that are generated."""
    interval: int = 128
    """Tokens between two selections while decoding."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        self._expect(_is_count(self.window) and self.window > 0, "window of 1 or more", self.window)
        self._expect(_is_count(self.sinks), "sinks of 0 or more", self.sinks)
        least = self.window + self.sinks
        enough = self.budget >= least if _is_count(self.budget) else _is_share(self.budget)
        self._expect(
            enough, f"budget of at least window + sinks = {least} rows, or a share between 0 and 1", self.budget
        )
        odd = _is_count(self.kernel_size) and self.kernel_size % 2 == 1
        self._expect(odd, "kernel_size odd", self.kernel_size)
        self._expect(self.pooling in POOLINGS, f"pooling in {POOLINGS}", repr(self.pooling))
        self._expect(type(self.every_chunk) is bool, "every_chunk True or False", self.every_chunk)
        bounded = _is_count(self.decode_budget) and (self.decode_budget == 0 or self.decode_budget >= least)
        self._expect(bounded, f"decode_budget 0, or at least window + sinks = {least} rows", self.decode_budget)
        self._expect(_is_count(self.interval) and self.interval > 0, "interval of 1 or more", self.interval)

    def rows(self, budget: int | float, seen: int) -> int:
        """Return a budget in rows once `seen` tokens have been seen."""
        return budget if isinstance(budget, int) else max(int(budget * seen), self.window + self.sinks)

    def _expect(self, condition: bool, expected: str, got: object) -> None:
        if not condition:
            raise ValueError(f"[{self.method}] expected {expected}, got {got}")


class WindowPolicy(Policy):
    """Selects over all rows held, once at the end of every prompt, and more often if the options say so.

    The newest tokens' queries are held from the first chunk of a prompt to its end, across chunks. With `decode_budget`
    they go on with the tokens that are generated. A later prompt has only its own queries; rows of earlier ones compete
    with its rows.
    """

    evicts = True

    def __init__(self, options: WindowOptions) -> None:
        """Make a policy that has seen nothing."""
        self.options = options
        self.evicts_while_decoding = bool(options.decode_budget)
        self._forget(0)

    def rows_kept(self, budget: int, seen: int) -> int:
        """Return how many rows this layer keeps of `seen` tokens when layers keep `budget` rows on average."""
        return budget

    def observe(self, chunk: Attended) -> bool:
        """Hold the newest queries, and drop rows where a prompt has ended or another selection is due."""
        if chunk.spans == [(0, 1)] and self.prompt.armed == [False] and not self.options.decode_budget:
            self.seen = [self.seen[0] + 1]  # an answer goes on, at nearly every call: no lists of a batch
            return False
        if not self.seen:
            self._forget(len(chunk.spans))
        counts = [last - first for first, last in chunk.spans]
        self.seen = [seen + n for seen, n in zip(self.seen, counts, strict=True)]
        armed = self.prompt.armed
        ended = self.prompt.advance(chunk.spans)
        if not self.options.decode_budget and max(counts) <= 1 and not any(ended):
            return False  # an answer goes on
        changed = self._watch(chunk, counts, armed, ended)
        held = chunk.store.lengths
        due: dict[int, int] = {}
        for b, n in enumerate(counts):
            budget = self._due(b, n, ended[b])
            kept = self.rows_kept(self.options.rows(budget, self.seen[b]), self.seen[b]) if budget else held[b]
            if kept < held[b]:
                due[b] = kept
        if due:
            self._compact(chunk, due)
        if any(ended) and not self.options.decode_budget:
            self.queries.drop_front([n if end else 0 for n, end in zip(self.queries.lengths, ended, strict=True)])
            self.queries = self.queries.select(range(len(ended)))  # without the room of those that are empty now
        return changed or bool(due)

    def _watch(self, chunk: Attended, counts: list[int], armed: list[bool], ended: list[bool]) -> bool:
        """Hold the queries of a prompt's newest tokens, all tokens' if rows are selected while decoding."""
        window = self.options.window
        if not self.options.decode_budget:
            starts = [n > 1 and not before for n, before in zip(counts, armed, strict=True)]
            counts = [n if n > 1 or end else 0 for n, end in zip(counts, ended, strict=True)]
            if not any(counts):
                return False
            self.queries.drop_front([n if start else 0 for n, start in zip(self.queries.lengths, starts, strict=True)])
        spans = [(last - min(n, window), last) for n, (_, last) in zip(counts, chunk.spans, strict=True)]
        self.queries.append(chunk.queries, spans)
        self.queries.drop_front([max(n - window, 0) for n in self.queries.lengths])
        return any(counts)

    def _due(self, sequence: int, count: int, ended: bool) -> int | float:
        """Return the budget that a sequence must be brought to now, 0 if none."""
        if ended or (count > 1 and self.options.every_chunk):
            self.steps[sequence] = 0
            return self.options.budget
        if count:
            self.steps[sequence] = self.steps[sequence] + 1 if count == 1 else 0
        if self.options.decode_budget and self.steps[sequence] == self.options.interval:
            self.steps[sequence] = 0
            return self.options.decode_budget
        return 0

    def choose(self, queries: mx.array, keys: mx.array, kept: int, chunk: Attended) -> mx.array:
        """Return the rows that one sequence keeps, ascending: [1, kv_heads, kept].

        Args:
            queries: the newest tokens', up to `window` of them [1, query_heads, tokens, key_dim].
            keys: of all rows held [1, kv_heads, rows, key_dim].
            kept: rows to keep, fewer than there are.
            chunk: what has just been attended to.
        """
        o = self.options
        return select_window_rows(
            queries,
            keys,
            kept,
            o.window,
            o.kernel_size,
            o.pooling,
            sinks=o.sinks,
            scale=chunk.scale,
            attention_sinks=chunk.sinks,
        )

    def _compact(self, chunk: Attended, due: dict[int, int]) -> None:
        """Keep due[b] rows of each sequence b."""
        keys, queries, held = chunk.store.dense()[0], self.queries.view(), chunk.store.lengths
        widest = max(due.values())
        selected: list[mx.array] = []
        for b, kept in due.items():
            own_queries, own_keys = queries[b : b + 1, :, : self.queries.lengths[b]], keys[b : b + 1, :, : held[b]]
            indices = self.choose(own_queries, own_keys, kept, chunk)
            selected.append(mx.pad(indices, [(0, 0), (0, 0), (0, widest - kept)]))
        chunk.store.take_from(list(due), mx.concatenate(selected), list(due.values()))

    def _forget(self, batch: int) -> None:
        self.prompt = PromptEnd([False] * batch)
        self.queries = RowBuffer(self.options.window)
        self.queries.clear(batch)
        self.seen = [0] * batch  # tokens of each sequence
        self.steps = [0] * batch  # tokens generated since the last selection

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
        chosen.queries = self.queries.select(sequences)
        chosen.seen = [self.seen[b] for b in sequences]
        chosen.steps = [self.steps[b] for b in sequences]
        return chosen

    def extend(self, other: Self) -> None:
        """Append the state of another policy's sequences."""
        self.prompt = PromptEnd(self.prompt.armed + other.prompt.armed)
        self.queries.extend(other.queries)
        self.seen, self.steps = self.seen + other.seen, self.steps + other.steps

    def arrays(self) -> dict[str, mx.array]:
        """Return the queries held."""
        return {} if self.queries.data is None else {"queries": self.queries.data}

    def places(self) -> dict[str, Any]:
        """Return everything else."""
        return {
            "queries": self.queries.places,
            "armed": self.prompt.armed,
            "seen": self.seen,
            "steps": self.steps,
        }

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another policy's arrays and places."""
        self.queries.load(arrays.get("queries"), places["queries"])
        self.prompt = PromptEnd(places["armed"])
        self.seen, self.steps = list(places["seen"]), list(places["steps"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1
