"""H2O's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_kv.accumulation import AccumulatingPolicy, AccumulationOptions, Kept

if TYPE_CHECKING:
    from mlx_kv import Geometry


@dataclass(frozen=True)
class H2O(AccumulationOptions):
    """Keep the rows that all queries so far have looked at most, and the newest (H2O, arXiv 2306.14048).

    A row's score is the attention it has had from every query, its own included, averaged over the query heads of a KV
    head. When a prompt ends, and after every token generated, each KV head keeps the `heavy` highest scores and the
    `recent` newest rows. The paper keeps shares of the prompt, 0.1 and 0.1.

    Raises:
        ValueError: if an option is out of its range.
    """

    heavy: int | float = 512
    """Rows to keep for their scores; a number between 0 and 1 is a share of the tokens seen when a prompt ends."""
    recent: int | float = 512
    """Newest rows to keep; a number between 0 and 1 is a share likewise."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, value in (("heavy", self.heavy), ("recent", self.recent)):
            count = type(value) is int and value > 0
            share = type(value) is float and 0 < value < 1
            _expect(count or share, f"{name} of 1 or more rows, or a share between 0 and 1", value)
        shares = [value for value in (self.heavy, self.recent) if type(value) is float]
        _expect(sum(shares) < 1, "shares of less than 1 together", sum(shares))
        _expect(type(self.every_chunk) is bool, "every_chunk True or False", self.every_chunk)

    def kept(self, tokens: int) -> Kept | None:
        """Return the rows to keep after a prompt that ended with so many tokens; all while a share has no prompt."""
        if tokens == 0 and float in (type(self.heavy), type(self.recent)):
            return None
        heavy, recent = (n if isinstance(n, int) else max(int(n * tokens), 1) for n in (self.heavy, self.recent))
        return Kept(heavy + recent, recent)

    def create(self, geometry: Geometry) -> AccumulatingPolicy:
        """Make the policy of one layer; any geometry will do."""
        return AccumulatingPolicy(self, geometry)


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[h2o] expected {expected}, got {got}")
