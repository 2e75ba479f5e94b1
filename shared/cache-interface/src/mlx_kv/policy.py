"""Policies: which rows of a layer are kept."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import mlx.core as mx

    from .store import Geometry


class Policy(ABC):  # noqa: B024 (a policy without state overrides nothing)
    """Decides which rows of one layer are kept. The base keeps all of them.

    One policy object serves one layer of one generation; a batch shares it as it shares the store.
    """

    evicts: bool = False
    """Whether rows are ever dropped: such a cache is never trimmable, and refused where layers share their rows."""

    def fresh(self) -> Self:
        """Return a policy of the same configuration that has seen nothing."""
        return type(self)()

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a policy with the state of these sequences, in this order."""
        return self.fresh()

    def extend(self, other: Self) -> None:  # noqa: B027 (nothing to add without state)
        """Append the state of another policy's sequences."""

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        return {}

    def places(self) -> dict[str, Any]:
        """Everything else that `load` needs, as numbers and lists that JSON can hold."""
        return {}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:  # noqa: B027 (no state)
        """Take over `arrays` and `places` of a policy of the same configuration."""


class KeepAllPolicy(Policy):
    """Keeps every row: compression is the store's alone."""


@dataclass(frozen=True)
class KeepAll:
    """Keep every row."""

    kind: ClassVar[str] = "policy"

    def create(self, geometry: Geometry) -> KeepAllPolicy:
        """Make the policy of one layer; any geometry will do."""
        return KeepAllPolicy()
