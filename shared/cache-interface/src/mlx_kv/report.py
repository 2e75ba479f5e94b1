"""What a cache holds, measured on its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import utils

from .cache import CompressedKVCache


@dataclass(frozen=True)
class LayerMemory:
    """One layer: `method` None and a `reason` where it is not compressed."""

    layer: int
    method: str | None
    rows: int
    """Rows held, of all sequences together; for a layer that keeps mlx-lm's own cache, the tokens it counts."""
    bytes_held: int
    """Bytes of the arrays held, room for growth included."""
    fp16_bytes: int
    """Bytes of the same tokens' keys and values at two bytes a number."""
    reason: str | None = None


@dataclass(frozen=True)
class MemoryReport:
    """A whole cache list."""

    layers: tuple[LayerMemory, ...]

    @property
    def bytes_held(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.bytes_held for layer in self.layers)

    @property
    def fp16_bytes(self) -> int:
        """Bytes that fp16 caches would hold in all layers."""
        return sum(layer.fp16_bytes for layer in self.layers)


def memory_report(cache: Sequence[Any]) -> MemoryReport:
    """Measure a cache list made by `make_prompt_cache`: nothing in it is computed from bit widths."""
    return MemoryReport(tuple(_measure(index, layer) for index, layer in enumerate(cache)))


def _measure(index: int, cache: Any) -> LayerMemory:
    if isinstance(cache, CompressedKVCache):
        held = sum(cache.store.lengths)
        return LayerMemory(index, cache.method, held, cache.nbytes, cache.fp16_bytes)
    reason = getattr(cache, "uncompressed_reason", "it keeps mlx-lm's own cache")
    held = _arrays(cache.state)
    # Recurrent states and ring buffers would be no smaller in fp16 than what they hold at two bytes a number.
    filled = _arrays(cache.keys_and_values()) if held and hasattr(cache, "keys_and_values") else held
    fp16 = sum(array.size * min(array.itemsize, 2) for array in filled)
    return LayerMemory(index, None, int(cache.size()), sum(array.nbytes for array in held), fp16, reason)


def _arrays(tree: Any) -> list[mx.array]:
    leaves = cast("list[tuple[str, Any]]", utils.tree_flatten(tree))
    return [value for _, value in leaves if isinstance(value, mx.array)]
