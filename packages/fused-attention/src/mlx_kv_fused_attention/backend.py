"""What mlx_kv finds through the entry-point group `mlx_kv.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import resolve_backend

from .attend import launch_attend, launch_exchange
from .plan import refusal

if TYPE_CHECKING:
    from mlx_kv.layout import Layout


class FusedAttention:
    """Fused decode attention, where it is faster than MLX's own."""

    @staticmethod
    def attend(
        queries: mx.array, layout: Layout, scale: float, sinks: mx.array | None, logits: bool
    ) -> tuple[mx.array, mx.array | None] | str:
        """Return the output and, with `logits`, those [batch, query_heads, 1, rows]; or why not.

        Raises:
            UnavailableBackendError: if MLX_KV_BACKEND names a backend that cannot run here.
        """
        backend = resolve_backend()
        reason = "the backend is the reference" if backend == "reference" else refusal(queries, layout, sinks)
        if reason is not None:
            return reason
        outputs = launch_attend(queries, layout, scale, sinks, logits, None, backend)
        return outputs[0], outputs[1] if logits else None

    @staticmethod
    def exchange(
        queries: mx.array, layout: Layout, scale: float, of_scores: Sequence[mx.array], noisy: bool
    ) -> list[mx.array] | str:
        """Return the output, scores, positions, overdue rows and the places that they take; or why not.

        Raises:
            UnavailableBackendError: if MLX_KV_BACKEND names a backend that cannot run here.
        """
        backend = resolve_backend()
        reason = "the backend is the reference" if backend == "reference" else refusal(queries, layout, of_scores[2])
        return reason or launch_exchange(queries, layout, scale, of_scores, noisy, backend)
