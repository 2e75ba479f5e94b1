"""When rows are dropped, and the state that a policy carries through batches, copies and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_kv.policy import Policy, PromptEnd

from .reference import select

if TYPE_CHECKING:
    from mlx_kv.policy import Attended


class ExamplePolicy(Policy):
    """Brings each sequence down to its budget when its prompt ends."""

    evicts = True

    def __init__(self, budget: int, sinks: int, kv_heads: int) -> None:
        """Make a policy that has seen nothing."""
        self.budget, self.sinks, self.kv_heads = budget, sinks, kv_heads
        self.prompt = PromptEnd()

    def observe(self, chunk: Attended) -> bool:
        """Drop rows of the sequences whose prompt ends with this chunk."""
        ended, held = self.prompt.advance(chunk.spans), chunk.store.lengths
        due = [b for b, end in enumerate(ended) if end and held[b] > self.budget]
        if due:
            kept = mx.stack([select(held[b], self.budget, self.sinks) for b in due])
            kept = mx.broadcast_to(kept[:, None], (len(due), self.kv_heads, self.budget))
            chunk.store.take_from(due, kept, [self.budget] * len(due))
        return bool(due)

    def fresh(self) -> Self:
        """Return a policy of the same configuration that has seen nothing."""
        return type(self)(self.budget, self.sinks, self.kv_heads)

    def blank(self, batch: int) -> Self:
        """Return a policy of the same configuration with `batch` sequences that have seen nothing."""
        return self._with([False] * batch)

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a policy with the state of these sequences."""
        return self._with([self.prompt.armed[b] for b in sequences])

    def extend(self, other: Self) -> None:
        """Append the state of another policy's sequences."""
        self.prompt = PromptEnd(self.prompt.armed + other.prompt.armed)

    def places(self) -> dict[str, Any]:
        """Return the state."""
        return {"armed": self.prompt.armed}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another policy's state."""
        self.prompt = PromptEnd(places["armed"])

    def _with(self, armed: Sequence[bool]) -> Self:
        policy = self.fresh()
        policy.prompt = PromptEnd(armed)
        return policy
