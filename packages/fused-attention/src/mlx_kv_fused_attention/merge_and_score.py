"""The second launch of a step whose attention is taken note of: splits are merged and scores kept up side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.accumulate import ACCUMULATE_SCORES, SIMDGROUPS, STEP_INPUTS
from mlx_kv_kernels.source import BODY_MARKER, joined

from .kernel import MERGE_ARRAYS, PACKAGE, own, read_files
from .merge import MERGE_SPLITS, TEMPLATE

SCORE_ARRAYS = (ACCUMULATE_SCORES.package, "kernels/accumulate_arrays.metal")
_MERGES = f"{BODY_MARKER}\n    if (threadgroup_position_in_grid.y == 0) {{\n"
_SCORES = (
    f"{BODY_MARKER}\n    }} else if (threadgroup_position_in_grid.x < uint(logits_shape[0] * scores_shape[1])) {{\n"
)
_END = f"{BODY_MARKER}\n    }}\n"


@dataclass(frozen=True)
class MergeAndScoreKernel(Kernel):
    """The bodies of merge_splits and accumulate_scores, each for threadgroups of its own."""

    @property
    def text(self) -> str:
        """The composed text; `#line` keeps every file's own name and lines in messages.

        What threads share is declared outside of any branch, as Metal wants it.
        """
        shared = read_files(MERGE_ARRAYS, SCORE_ARRAYS, *MERGE_SPLITS.basis_sources)
        merge, score = read_files(own(MERGE_SPLITS), own(ACCUMULATE_SCORES))
        return joined((*shared, (self.name, _MERGES), merge, (self.name, _SCORES), score, (self.name, _END)))


MERGE_AND_SCORE = MergeAndScoreKernel(
    "merge_and_score",
    PACKAGE,
    ("partial", "logits", "scores", "positions", *STEP_INPUTS),
    ("output", *ACCUMULATE_SCORES.output_names),
    template=(*TEMPLATE, "GROUP", "NOISE"),
)


def launch_merge_and_score(
    partial: mx.array,
    logits: mx.array,
    of_scores: Sequence[mx.array],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    noisy: bool,
    backend: str,
) -> list[mx.array]:
    """Do what `launch_merge` and `accumulate_held` do: output, scores, positions and the row of each head that goes.

    `of_scores` are scores, positions and `step_arrays`, whose sinks serve both.
    """
    (heads, _, width), scores = partial.shape, of_scores[0].shape
    batch, query_heads = logits.shape[:2]
    return MERGE_AND_SCORE(
        inputs=[partial, logits, *of_scores],
        template={
            "T": dtype,
            "DIM": width - 1,
            "SINKS": True,
            "SINK_COUNT": query_heads,
            "SIMDGROUPS": SIMDGROUPS,
            "GROUP": query_heads // scores[1],
            "NOISE": noisy,
        },
        grid=(heads * 32 * SIMDGROUPS, 2, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[shape, scores, scores, (batch, scores[1])],
        output_dtypes=[dtype, mx.float32, mx.int32, mx.uint32],
        backend=backend,
    )
