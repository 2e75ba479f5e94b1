"""Example's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .policy import ExamplePolicy

if TYPE_CHECKING:
    from mlx_kv import Geometry


@dataclass(frozen=True)
class Example:
    """Keep a prompt's first rows and its newest (Xiao et al., arXiv 2309.17453, section 3.2).

    Raises:
        ValueError: if an option is out of its range.
    """

    kind: ClassVar[str] = "policy"

    budget: int = 1024
    """Rows to keep when a prompt ends."""
    sinks: int = 4
    """First rows, always kept, within the budget."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.sinks < self.budget:
            raise ValueError(f"[example] expected sinks from 0 to below budget {self.budget}, got {self.sinks}")

    def create(self, geometry: Geometry) -> ExamplePolicy:
        """Make the policy of one layer; any geometry will do."""
        return ExamplePolicy(self.budget, self.sinks, geometry.kv_heads)
