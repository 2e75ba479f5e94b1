"""The RVQ store: one layer's keys and values, encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_kv.layout import Layout
from mlx_kv.rows import RowBuffer, Span
from mlx_kv.store import Store, whole
from mlx_kv_kernels import gather_rows

from .config import BLOCK, Rvq
from .layout import describe
from .packed import PackedRows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from mlx_kv import Policy

    from .codec import Codec
    from .trained_config import TrainedRvq


class RvqStore(Store):
    """Keys and values encoded row by row as they leave the newest ones; centred keys in blocks of 128.

    Of n rows (r = rollback, R = residual), max(0, n - r - R) are packed, of centred keys the whole blocks among them.
    """

    def __init__(self, config: Rvq | TrainedRvq | None = None, codecs: tuple[Codec, Codec] | None = None) -> None:
        """Make an empty store; `codecs` of keys and values come with trained codebooks, which are a layer's own."""
        self.config = c = config or Rvq()
        self.rollback = c.rollback
        self.defer = c.defer
        if codecs is None:
            if not isinstance(c, Rvq):
                raise ValueError("[trained_rvq] expected a store made by create(geometry): codebooks are a layer's own")
            codecs = c.codecs()
        key_codec, value_codec = codecs
        self.keys, self.values = PackedRows(key_codec, c.sinks), PackedRows(value_codec, c.sinks)
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
        """Append a chunk in full precision, after encoding what the rows before it had made due."""
        self.config.check(keys.shape[3], values.shape[3])
        spans = whole(keys) if spans is None else spans
        if not self._rows:
            self.load({}, self.blank(len(spans)).places())
        self.settle()
        self.keys.append(keys, spans)
        self.values.append(values, spans)
        self._rows = [n + last - first for n, (first, last) in zip(self._rows, spans, strict=True)]
        self._most = [max(n, m) for n, m in zip(self._rows, self._most, strict=True)]
        counts = [last - first for first, last in spans]
        drafted = 1 + self.config.rollback  # as many at a time may be a draft that is being verified
        self._in_prompt = [n > drafted if n else before for n, before in zip(counts, self._in_prompt, strict=True)]

    def accept(self, policy: Policy) -> None:
        """Hold prompts in full precision until they end where a policy then chooses rows: it encodes only those.

        Raises:
            ValueError: if rows are to go while decoding, and keys are centred.
        """
        if policy.evicts_while_decoding and self.keys.codec.centered:
            raise ValueError(
                "[rvq] expected center=False with a policy that evicts rows while decoding, got center=True: centred "
                "keys hang on their block of 128 rows"
            )
        self.defer = self.defer or policy.evicts

    def settle(self) -> None:
        """Encode the rows that are due; with `defer`, not before the prompt has ended."""
        waits = [self.defer and in_prompt for in_prompt in self._in_prompt]
        lowest = [n - self.config.rollback for n in self._most]
        for side in (self.keys, self.values):
            side.settle(self._rows, self._packed(side, self._rows), self._packed(side, lowest), waits)

    def dense(self) -> tuple[mx.array, mx.array]:
        """Return keys and values in the model's dtype."""
        return self.keys.dense(self._rows), self.values.dense(self._rows)

    def layout(self) -> Layout | None:
        """Describe the encoded rows for attention that reads them as they are."""
        return describe(self)

    def take(self, indices: Int[mx.array, "batch kv_heads kept"], counts: Sequence[int]) -> None:
        """Keep a subset of the rows; codes stay as they are where at least half of the residual is left beside them.

        Else, and always if keys are centred, the rows are read back and encoded anew as the rule for so many says.
        """
        stays = [b for b, n in enumerate(counts) if self._can_gather(b, n)]
        if len(stays) == len(counts):
            self.keys.take(indices, counts, self._rows)
            self.values.take(indices, counts, self._rows)
            self._rows, self._most = list(counts), list(counts)
        elif stays:  # each sequence as if it were alone
            others = [b for b in range(len(counts)) if b not in stays]
            for group in (stays, others):
                self.take_from(group, indices[mx.array(group)], [counts[b] for b in group])
        else:
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
        for side in (self.keys, self.values):
            side.truncate(counts, self._packed(side, self._rows))

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
        store = type(self)(self.config, (self.keys.codec, self.values.codec))
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
        chosen._adopt_form(self)
        return chosen

    def extend(self, other: Self) -> None:
        """Append another store's sequences."""
        super().extend(other)
        self._rows, self._most = self._rows + other._rows, self._most + other._most
        self._in_prompt = self._in_prompt + other._in_prompt
        if other.keys.dim:
            self._adopt_form(other)

    def places(self) -> dict[str, Any]:
        """Everything but the arrays."""
        own = {"rows": self._rows, "most": self._most, "in_prompt": self._in_prompt}
        return {**super().places(), **own, "keys": self.keys.places(), "values": self.values.places()}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another store's arrays and places."""
        super().load(arrays, places)
        self._rows, self._most, self._in_prompt = places["rows"], places["most"], places["in_prompt"]
        self.keys.load(places["keys"])
        self.values.load(places["values"])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, trained codebooks included."""
        return super().nbytes + self.keys.codec.nbytes + self.values.codec.nbytes

    def _adopt_form(self, other: RvqStore) -> None:
        self.keys.load(other.keys.places())
        self.values.load(other.values.places())

    def _packed(self, side: PackedRows, rows: Sequence[int]) -> list[int]:
        size = BLOCK if side.codec.centered else 1
        return [size * (max(0, n - self.config.rollback - self.config.residual) // size) for n in rows]

    def _can_gather(self, sequence: int, kept: int) -> bool:
        packed = self.keys.codes.lengths[sequence]
        enough = kept - min(packed, kept) >= (self.config.residual + self.config.rollback) // 2
        return enough and not self.keys.codec.centered
