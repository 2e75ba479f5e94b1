"""Decode steps in which the newest row takes the place of another, each of them one function that MLX compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_kv_kernels import resolve_backend
from mlx_kv_kernels.accumulate import Noise, Step, step_arrays
from mlx_kv_kernels.backend import Backend
from mlx_kv_kernels.launch import Launch, launches

from . import attention
from .layout import Extent, Format, Layout
from .store import Store

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32


def exchange(
    store: Store,
    most: int,
    queries: Float[mx.array, "1 query_heads 1 key_dim"],
    scale: float,
    sinks: Float[mx.array, " query_heads"] | None,
    scores: Float32[mx.array, "1 kv_heads total 1"],
    positions: Int32[mx.array, "1 kv_heads total 1"],
    step: Step,
    noise: Noise | None,
) -> list[mx.array] | None:
    """Attend to all rows, add the attention to the scores, and find the row whose place the newest one takes.

    Such steps follow each other alike but for a few numbers, so that the host need not describe them op by op. The
    arguments are those of `Store.exchange`, `attention.decode` and `accumulate_held`.

    Returns:
        The output, and in place of what was given scores, positions, overdue rows and their places, the newest row now
        the last of these; None, with nothing computed, if there is no kernel for the case.
    """
    backend = resolve_backend()
    if backend == "reference" or not attention.installed():
        return None
    rows = store.exchange(most)
    if rows is None:
        return None
    launch = _launch(rows.format, rows.extent, scale, noise is not None, backend)
    of_step = step_arrays([step], queries.shape[1], sinks, noise)
    return launch([queries, *rows.arrays, scores, positions, *of_step]) or None


@launches
def _launch(format: Format, extent: Extent, scale: float, noisy: bool, backend: Backend) -> Launch:
    def launch(arrays: list[mx.array]) -> list[mx.array]:
        queries, of_scores = arrays[0], arrays[7:]
        layout = Layout(format, tuple(arrays[1:7]), extent, _unread)
        return attention.exchange(queries, layout, scale, of_scores, noisy) or []

    return Launch(launch, compiles=backend != "emulator")


def _unread() -> tuple[mx.array, mx.array]:
    raise NotImplementedError("[mlx_kv] attention of an installed backend reads the arrays themselves")
