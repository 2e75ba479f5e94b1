"""SnapKV's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mlx_kv.window import WindowOptions, WindowPolicy

if TYPE_CHECKING:
    from mlx_kv import Geometry


@dataclass(frozen=True)
class SnapKV(WindowOptions):
    """Keep the rows of a prompt that its last tokens look at, per KV head (SnapKV, arXiv 2404.14469).

    When a prompt ends, the attention of its last `window` queries is summed over the queries, averaged over the query
    heads of a KV head and pooled over neighbouring rows; the highest `budget - window` rows stay, and the window.

    Options are those of `WindowOptions`: budget 1024, window 32, kernel_size 7, pooling max, sinks 0, every_chunk
    False, decode_budget 0, interval 128. The official code has a budget of 2048, kernel_size 5 and average pooling.

    Raises:
        ValueError: if an option is out of its range.
    """

    method: ClassVar[str] = "snapkv"

    def create(self, geometry: Geometry) -> WindowPolicy:
        """Make the policy of one layer; any geometry will do."""
        return WindowPolicy(self)
