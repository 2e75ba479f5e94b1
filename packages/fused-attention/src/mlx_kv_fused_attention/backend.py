"""What mlx_kv finds through the entry-point group `mlx_kv.attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import resolve_backend

from .attend import launch_attend
from .plan import refusal

if TYPE_CHECKING:
    from mlx_kv.layout import Layout


class FusedAttention:
    """Fused decode attention, where it is faster than MLX's own."""

    @staticmethod
    def covers(queries: mx.array, layout: Layout, sinks: mx.array | None, logits: bool) -> str | None:
        """Return why a decode step had better be done otherwise; None if `attend` should do it.

        Raises:
            UnavailableBackendError: if MLX_KV_BACKEND names a backend that cannot run here.
        """
        if resolve_backend() == "reference":
            return "the backend is the reference"
        return refusal(queries, layout, sinks)

    @staticmethod
    def attend(
        queries: mx.array, layout: Layout, scale: float, sinks: mx.array | None, logits: bool
    ) -> tuple[mx.array, mx.array | None]:
        """Attend in a case that `covers` covers; with `logits`, also the logits [batch, query_heads, 1, rows]."""
        outputs = launch_attend(queries, layout, scale, sinks, logits, None, resolve_backend())
        return outputs[0], outputs[1] if logits else None
