"""The KIVI store: one layer's keys and values, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_kv.layout import Layout
from mlx_kv.rows import RowBuffer, Span
from mlx_kv.store import Store, whole
from mlx_kv_kernels import gather_rows

from .config import Kivi
from .layout import describe
from .packed import PackedRows
from .quantize import dequantize_keys, dequantize_values, quantize_keys, quantize_values

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from mlx_kv import Policy


class KiviStore(Store):
    """Keys quantised per channel in blocks of `residual` rows, values per token as they leave the newest rows.

    Of n rows (r = rollback, R = residual), R * floor(max(0, n - r) / R) keys and max(0, n - r - R) values are packed.
    """

    def __init__(self, config: Kivi | None = None) -> None:
        """Make an empty store."""
        self.config = c = config or Kivi()
        self.rollback = c.rollback
        self.defer = c.defer
        keys = {"bits": c.bits_of_keys, "group_size": c.group_size}
        values = {"bits": c.bits_of_values, "group_size": c.group_size}
        self.keys = PackedRows(partial(quantize_keys, **keys), partial(dequantize_keys, **keys), c.group_size, c.sinks)
        self.values = PackedRows(partial(quantize_values, **values), partial(dequantize_values, **values), 1, c.sinks)
        self._rows: list[int] = []
        self._most: list[int] = []  # rows that each sequence has had at most: `truncate` reaches back from there
        self._in_prompt: list[bool] = []  # whether each sequence's newest tokens came as a prompt

    @property
    def lengths(self) -> list[int]:
        """Rows held by each sequence."""
        return self._rows

    def append(
        self,
        keys: Float[mx.array, "batch kv_heads chunk key_dim"],
        values: Float[mx.array, "batch kv_heads chunk value_dim"],
        spans: Sequence[Span] | None = None,
    ) -> None:
        """Append a chunk in full precision, after quantising what the rows before it had made due."""
        self.config.check(keys.shape[3], values.shape[3])
        spans = whole(keys) if spans is None else spans
        if not self._rows:
            self.load({}, self.blank(len(spans)).places())
        self.settle()
        self.keys.tail.append(keys, spans)
        self.values.tail.append(values, spans)
        self._rows = [n + last - first for n, (first, last) in zip(self._rows, spans, strict=True)]
        self._most = [max(n, m) for n, m in zip(self._rows, self._most, strict=True)]
        counts = [last - first for first, last in spans]
        drafted = 1 + self.config.rollback  # as many at a time may be a draft that is being verified
        self._in_prompt = [n > drafted if n else before for n, before in zip(counts, self._in_prompt, strict=True)]

    def accept(self, policy: Policy) -> None:
        """Hold prompts in full precision until they end where a policy then chooses rows: it quantises only those.

        Raises:
            ValueError: if the policy drops a row at every step.
        """
        if policy.evicts_every_step:
            raise ValueError(
                "[kivi] expected a policy that drops rows when a prompt ends, got one that drops a row at every step: "
                f"{self.config.group_size} tokens share the scale of a key's channel, and would be quantised again and "
                "again"
            )
        self.defer = self.defer or policy.evicts

    def settle(self) -> None:
        """Quantise the rows that are due; with `defer`, not before the prompt has ended."""
        waits = [self.defer and in_prompt for in_prompt in self._in_prompt]
        lowest = [n - self.config.rollback for n in self._most]
        for side, packed in ((self.keys, self._packed_keys), (self.values, self._packed_values)):
            side.settle(self._rows, packed(self._rows), packed(lowest), waits)

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return keys and values in the model's dtype."""
        return self.keys.dense(self._rows), self.values.dense(self._rows)

    def layout(self) -> Layout | None:
        """Describe the packed rows for attention that reads them as they are."""
        return describe(self)

    def take(self, indices: Int[mx.array, "batch kv_heads kept"], counts: Sequence[int]) -> None:
        """Keep a subset of the rows and quantise it anew: the groups of packed rows have other members now."""
        keys, values = (gather_rows(rows, indices) for rows in self.dense())
        in_prompt = self._in_prompt
        self.load({}, self.blank(len(counts)).places())
        self.append(keys, values, [(0, n) for n in counts])
        self._in_prompt = in_prompt
        self.settle()

    def truncate(self, rows: int) -> None:
        """Drop the newest rows; the codes of rows that would not have been packed without them go too."""
        counts = [min(rows, n) for n in self._rows]
        self._rows = [n - count for n, count in zip(self._rows, counts, strict=True)]
        self.keys.truncate(counts, self._packed_keys(self._rows))
        self.values.truncate(counts, self._packed_values(self._rows))

    def can_truncate(self, rows: int) -> bool:
        """Tell whether no sequence would go back further than `rollback` rows from the most it has had."""
        return all(
            most - max(n - rows, 0) <= self.config.rollback for n, most in zip(self._rows, self._most, strict=True)
        )

    def buffers(self) -> dict[str, RowBuffer]:
        """All buffers."""
        sides = (("keys", self.keys), ("values", self.values))
        return {f"{side}_{name}": buffer for side, rows in sides for name, buffer in rows.buffers().items()}

    def fresh(self) -> Self:
        """Return an empty store of the same configuration."""
        store = type(self)(self.config)
        store.defer = self.defer
        return store

    def blank(self, batch: int) -> Self:
        """Return a store of the same configuration with `batch` empty sequences."""
        store = super().blank(batch)
        store._rows, store._most, store._in_prompt = [0] * batch, [0] * batch, [False] * batch
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences."""
        chosen = super().select(sequences)
        chosen._rows = [self._rows[b] for b in sequences]
        chosen._most = [self._most[b] for b in sequences]
        chosen._in_prompt = [self._in_prompt[b] for b in sequences]
        return chosen

    def extend(self, other: Self) -> None:
        """Append another store's sequences."""
        super().extend(other)
        self._rows, self._most = self._rows + other._rows, self._most + other._most
        self._in_prompt = self._in_prompt + other._in_prompt

    def places(self) -> dict[str, Any]:
        """Everything but the arrays."""
        return {**super().places(), "rows": self._rows, "most": self._most, "in_prompt": self._in_prompt}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another store's arrays and places."""
        super().load(arrays, places)
        self._rows, self._most, self._in_prompt = places["rows"], places["most"], places["in_prompt"]

    def _packed_keys(self, rows: Sequence[int]) -> list[int]:
        residual = self.config.residual
        return [residual * (max(0, n - self.config.rollback) // residual) for n in rows]

    def _packed_values(self, rows: Sequence[int]) -> list[int]:
        return [max(0, n - self.config.rollback - self.config.residual) for n in rows]
