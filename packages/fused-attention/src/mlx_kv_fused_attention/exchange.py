"""The second launch of a step in which a row takes the place of another: splits, scores and rows side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.accumulate import ACCUMULATE_SCORES, SIMDGROUPS, STEP_INPUTS
from mlx_kv_kernels.source import BODY_MARKER, joined

from .kernel import MERGE_ARRAYS, PACKAGE, own, read_files
from .merge import MERGE_SPLITS, TEMPLATE

_SCORE_ARRAYS = (ACCUMULATE_SCORES.package, "kernels/accumulate_arrays.metal")
_APPEND = (PACKAGE, "kernels/append_overdue.metal")
_NEWEST = ("newest_key", "newest_value", "overdue_rows", "overdue_from")


@dataclass(frozen=True)
class FinishExchangeKernel(Kernel):
    """The bodies of merge_splits, accumulate_scores and append_overdue, each for threadgroups of its own."""

    @property
    def text(self) -> str:
        """The composed text; `#line` keeps every file's own name and lines in messages.

        What threads share is declared outside of any branch, as Metal wants it.
        """
        shared = read_files(MERGE_ARRAYS, _SCORE_ARRAYS, *MERGE_SPLITS.basis_sources)
        merge, score, append = read_files(own(MERGE_SPLITS), own(ACCUMULATE_SCORES), _APPEND)
        of_kv_head = "threadgroup_position_in_grid.x < uint(scores_shape[1])"
        return joined(
            (
                *shared,
                self._line("if (threadgroup_position_in_grid.y == 0) {"),
                merge,
                self._line(f"}} else if (threadgroup_position_in_grid.y == 1 && {of_kv_head}) {{"),
                score,
                self._line(f"}} else if ({of_kv_head}) {{"),
                append,
                self._line("}"),
            )
        )

    def _line(self, statement: str) -> tuple[str, str]:
        return self.filename, f"{BODY_MARKER}\n    {statement}\n"


FINISH_EXCHANGE = FinishExchangeKernel(
    "finish_exchange",
    PACKAGE,
    ("partial", "logits", "scores", "positions", *STEP_INPUTS, *_NEWEST),
    ("output", *ACCUMULATE_SCORES.output_names, "out_overdue"),
    template=(*TEMPLATE, "GROUP", "NOISE"),
)


def finish_exchange(
    partial: mx.array,
    logits: mx.array,
    of_layout: Sequence[mx.array],
    scores: mx.array,
    of_step: Sequence[mx.array],
    noisy: bool,
    backend: str,
) -> list[mx.array]:
    """Do what `launch_merge` and `accumulate_held` do, and let the newest row join the overdue ones.

    `of_layout` are the arrays of an `exchanged_format`, `of_step` is what `step_arrays` returns; its sinks serve both.

    Returns:
        The output, scores, positions, the row of each head that goes, the overdue rows.
    """
    _, _, newest_key, newest_value, overdue, positions, overdue_from = of_layout
    query_heads, kv_heads, dim = logits.shape[1], scores.shape[1], newest_value.shape[3]
    return FINISH_EXCHANGE(
        inputs=[partial, logits, scores, positions, *of_step, newest_key, newest_value, overdue, overdue_from],
        template={
            "T": overdue.dtype,
            "DIM": dim,
            "SINKS": True,
            "SINK_COUNT": query_heads,
            "SIMDGROUPS": SIMDGROUPS,
            "GROUP": query_heads // kv_heads,
            "NOISE": noisy,
        },
        grid=(query_heads * 32 * SIMDGROUPS, 3, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(1, query_heads, 1, dim), scores.shape, scores.shape, (1, kv_heads), overdue.shape],
        output_dtypes=[overdue.dtype, mx.float32, mx.int32, mx.uint32, overdue.dtype],
        backend=backend,
    )
