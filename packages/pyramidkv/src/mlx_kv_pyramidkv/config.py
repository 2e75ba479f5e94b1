"""PyramidKV's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mlx_kv.window import WindowOptions

if TYPE_CHECKING:
    from mlx_kv import Geometry

    from .policy import PyramidKVPolicy


@dataclass(frozen=True)
class PyramidKV(WindowOptions):
    """Keep the rows of a prompt that its last tokens look at, more in lower layers (PyramidKV, arXiv 2406.02069).

    A layer's rows are selected as SnapKV does; `budget` is the average of all layers, `layer_budgets` shares it out.
    The other options are those of `WindowOptions`: kernel_size 7, pooling max, sinks 0 (within a layer's rows),
    every_chunk False, decode_budget 0 (an average, too), interval 128.

    Raises:
        ValueError: if an option is out of its range.
    """

    method: ClassVar[str] = "pyramidkv"

    window: int = 8
    """Newest rows, which are always kept; their queries vote on the others."""
    beta: int = 20
    """The last layer has 1/beta of the average rows beyond the window; 1 is SnapKV."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        self._expect(type(self.beta) is int and self.beta >= 1, "beta of 1 or more", self.beta)

    def create(self, geometry: Geometry) -> PyramidKVPolicy:
        """Make the policy of one layer, which is one of `geometry.layers` that are compressed."""
        from .policy import PyramidKVPolicy  # here, so that reading the options does not pull in the policy

        return PyramidKVPolicy(self, geometry)
