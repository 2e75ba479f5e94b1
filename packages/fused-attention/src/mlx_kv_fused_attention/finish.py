"""The second launch of a step in which a row takes the place of another: splits, scores and rows side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.accumulate import ACCUMULATE_SCORES, SIMDGROUPS, STEP_INPUTS
from mlx_kv_kernels.source import BODY_MARKER, joined

from .kernel import MERGE_ARRAYS, PACKAGE, ROW_NOISE, own, read_files
from .merge import MERGE_SPLITS, TEMPLATE

OF_SCORES = ("scores", "positions", *STEP_INPUTS)
"""What a step takes besides the rows; the last, the noise's seeds, for attention alone."""
_SCORE_ARRAYS = (ACCUMULATE_SCORES.package, "kernels/accumulate_arrays.metal")
_APPEND = (PACKAGE, "kernels/append_overdue.metal")
_NEWEST = ("newest_key", "newest_value", "overdue_rows", "taken")


@dataclass(frozen=True)
class FinishExchangeKernel(Kernel):
    """The bodies of merge_splits, accumulate_scores and append_overdue, each for threadgroups of its own."""

    @property
    def text(self) -> str:
        """The composed text; `#line` keeps every file's own name and lines in messages.

        What threads share is declared outside of any branch, as Metal wants it.
        """
        shared = read_files(MERGE_ARRAYS, ROW_NOISE[0], _SCORE_ARRAYS, *MERGE_SPLITS.basis_sources)
        merge, score, append = read_files(own(MERGE_SPLITS), own(ACCUMULATE_SCORES), _APPEND)
        return joined(
            (
                *shared,
                self._line("constexpr bool NOISE = false;"),  # attention has added it
                self._line("const int seeds[3] = {0, 0, 0};"),
                self._line("const uint overdue = taken[(taken_shape[0] - 1) * scores_shape[1]];"),
                self._line("device uint* dropped = out_taken + overdue * scores_shape[1];"),
                self._line("if (threadgroup_position_in_grid.y == 0) {"),
                merge,
                self._line("} else if (threadgroup_position_in_grid.y == 2) {"),
                append,
                self._line("} else if (threadgroup_position_in_grid.x < uint(scores_shape[1])) {"),
                score,
                self._line("}"),
            )
        )

    def _line(self, statement: str) -> tuple[str, str]:
        return self.filename, f"{BODY_MARKER}\n    {statement}\n"


FINISH_EXCHANGE = FinishExchangeKernel(
    "finish_exchange",
    PACKAGE,
    ("partial", "logits", *OF_SCORES[:4], *_NEWEST),
    ("output", "out_scores", "out_positions", "out_overdue", "out_taken"),
    template=(*TEMPLATE, "GROUP"),
)


def finish_exchange(
    partial: mx.array,
    logits: mx.array,
    of_layout: Sequence[mx.array],
    of_scores: Sequence[mx.array],
    backend: str,
) -> list[mx.array]:
    """Do what `launch_merge` and `accumulate_held` do, and let the newest row join the overdue ones.

    `of_layout` are the arrays of an `exchanged_format`; `of_scores` are scores, positions and `step_arrays`, whose
    sinks serve both. Noise is among the logits already.

    Returns:
        The output, scores, positions, the overdue rows and their places.
    """
    newest_value, overdue, taken = of_layout[3:6]
    query_heads, scores, dim = logits.shape[1], of_scores[0].shape, newest_value.shape[3]
    return FINISH_EXCHANGE(
        inputs=[partial, logits, *of_scores[:4], *of_layout[2:]],
        template={
            "T": overdue.dtype,
            "DIM": dim,
            "SINKS": True,
            "SINK_COUNT": query_heads,
            "SIMDGROUPS": SIMDGROUPS,
            "GROUP": query_heads // scores[1],
        },
        grid=(query_heads * 32 * SIMDGROUPS, 3, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(1, query_heads, 1, dim), scores, scores, overdue.shape, taken.shape],
        output_dtypes=[overdue.dtype, mx.float32, mx.int32, overdue.dtype, mx.uint32],
        backend=backend,
    )
