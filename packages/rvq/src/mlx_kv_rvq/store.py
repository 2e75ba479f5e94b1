"""The RVQ store: one layer's keys and values, encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_kv.packing import PackedStore

from .config import BLOCK, TOGETHER, Rvq
from .layout import describe
from .packed import PackedRows

if TYPE_CHECKING:
    from jaxtyping import Int

    from mlx_kv import Policy
    from mlx_kv.layout import Layout

    from .codec import Codec
    from .trained_config import TrainedRvq


class RvqStore(PackedStore[PackedRows]):
    """Keys and values encoded as they leave the newest rows, 32 rows at a time, centred keys in blocks of 128.

    Of n rows (r = rollback, R = residual), the whole blocks among the first max(0, n - r - R) are packed.
    """

    def __init__(self, config: Rvq | TrainedRvq | None = None, codecs: tuple[Codec, Codec] | None = None) -> None:
        """Make an empty store; `codecs` of keys and values come with trained codebooks, which are a layer's own."""
        self.config = c = config or Rvq()
        if codecs is None:
            if not isinstance(c, Rvq):
                raise ValueError("[trained_rvq] expected a store made by create(geometry): codebooks are a layer's own")
            codecs = c.codecs()
        keys, values = (PackedRows(codec, c.sinks) for codec in codecs)
        super().__init__(keys, values, c.rollback, c.defer)

    def check(self, key_dim: int, value_dim: int) -> None:
        """Refuse rows that the configuration does not fit."""
        self.config.check(key_dim, value_dim)

    def packed(self, side: PackedRows, rows: Sequence[int]) -> list[int]:
        """All but the newest rows, in whole blocks."""
        size = BLOCK if side.codec.centered else TOGETHER
        return [size * (max(0, n - self.config.rollback - self.config.residual) // size) for n in rows]

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

    def describe(self) -> Layout | None:
        """Return the layout without the tails' arrays."""
        return describe(self)

    def take(self, indices: Int[mx.array, "batch kv_heads kept"], counts: Sequence[int]) -> None:
        """Keep a subset of the rows; codes stay as they are where at least half of the residual is left beside them.

        Else, and always if keys are centred, the rows are read back and encoded anew as the rule for so many says.
        """
        self._pack_waiting()
        stays = [b for b, n in enumerate(counts) if self._can_gather(b, n)]
        if not stays:
            return super().take(indices, counts)
        if len(stays) == len(counts):
            self.keys.take(indices, counts, self._rows)
            self.values.take(indices, counts, self._rows)
            self._rows, self._most = list(counts), list(counts)
        else:  # each sequence as if it were alone
            others = [b for b in range(len(counts)) if b not in stays]
            for group in (stays, others):
                self.take_from(group, indices[mx.array(group)], [counts[b] for b in group])
        return self.settle()

    def fresh(self) -> Self:
        """Return an empty store of the same configuration."""
        store = type(self)(self.config, (self.keys.codec, self.values.codec))
        store.defer = self.defer
        return store

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a store that holds these sequences."""
        chosen = super().select(sequences)
        chosen._adopt_form(self)
        return chosen

    def extend(self, other: Any) -> None:
        """Append another store's sequences."""
        super().extend(other)
        if other.keys.dim:
            self._adopt_form(other)

    def places(self) -> dict[str, Any]:
        """Everything but the arrays."""
        return {**super().places(), "keys": self.keys.places(), "values": self.values.places()}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:
        """Take over another store's arrays and places."""
        super().load(arrays, places)
        self.keys.load(places["keys"])
        self.values.load(places["values"])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, trained codebooks included."""
        return super().nbytes + self.keys.codec.nbytes + self.values.codec.nbytes

    def _adopt_form(self, other: RvqStore) -> None:
        self.keys.load(other.keys.places())
        self.values.load(other.values.places())

    def _can_gather(self, sequence: int, kept: int) -> bool:
        packed = self.keys.codes.lengths[sequence]
        enough = kept - min(packed, kept) >= (self.config.residual + self.config.rollback) // 2
        return enough and not self.keys.codec.centered
