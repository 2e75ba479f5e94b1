"""The KIVI store: one layer's keys and values, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from mlx_kv.packing import PackedStore

from .config import Kivi
from .layout import describe
from .packed import PackedRows, Quantizer

if TYPE_CHECKING:
    from mlx_kv import Policy
    from mlx_kv.layout import Layout


class KiviStore(PackedStore[PackedRows]):
    """Keys quantised per channel in blocks of `residual` rows, values per token as they leave the newest rows.

    Of n rows (r = rollback, R = residual), R * floor(max(0, n - r) / R) keys and max(0, n - r - R) values are packed,
    while single tokens come up to 32 values fewer, which wait (packing.py).
    """

    def __init__(self, config: Kivi | None = None) -> None:
        """Make an empty store."""
        self.config = c = config or Kivi()
        super().__init__(
            PackedRows(Quantizer(c.bits_of_keys, c.group_size, per_channel=True), c.sinks),
            PackedRows(Quantizer(c.bits_of_values, c.group_size, per_channel=False), c.sinks),
            c.rollback,
            c.defer,
        )

    def check(self, key_dim: int, value_dim: int) -> None:
        """Refuse rows that the configuration does not fit."""
        self.config.check(key_dim, value_dim)

    def packed(self, side: PackedRows, rows: Sequence[int]) -> list[int]:
        """Whole blocks of keys, and single values."""
        residual, rollback = self.config.residual, self.config.rollback
        if side is self.keys:
            return [residual * (max(0, n - rollback) // residual) for n in rows]
        return [max(0, n - rollback - residual) for n in rows]

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

    def describe(self) -> Layout | None:
        """Return the layout without the tails' arrays."""
        return describe(self)

    def fresh(self) -> Self:
        """Return an empty store of the same configuration."""
        store = type(self)(self.config)
        store.defer = self.defer
        return store
