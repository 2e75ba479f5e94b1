"""Scores of rows by all attention so far, kept up to date while decoding: what H2O and Keyformer drop rows by.

A prompt's scores are `window.window_scores` of all its queries.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from . import accumulate_reference as reference
from .backend import Backend, resolve_backend
from .kernel import Kernel
from .launch import Launch, launches
from .numbers import new_numbers, numbers
from .rows import topk_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32, UInt32

STEP_INPUTS = ("sinks", "steps", "seeds")
"""What `step_arrays` returns, by the kernel's names."""
SIMDGROUPS = 16
"""Of a threadgroup, which has a KV head's scores: few enough for Metal to merge splits beside them in one launch."""
ACCUMULATE_SCORES = Kernel(
    "accumulate_scores",
    "mlx_kv_kernels",
    ("logits", "scores", "positions", *STEP_INPUTS),
    ("out_scores", "out_positions", "dropped"),
    template=("GROUP", "NOISE", "SIMDGROUPS"),
    helpers=("gumbel", "accumulate_arrays"),
)


class Step(NamedTuple):
    """Where one sequence's scores are, and what its next token does to them."""

    begin: int
    """First place of its room in the scores."""
    rows: int
    """Rows attended to, the new token's as the last; 0 if the sequence has no token in this step."""
    limit: int
    """First place behind its room."""
    position: int
    """Of the new token."""
    window: int = 0
    """Rows of this position and later ones are kept whatever their score."""
    drops: bool = False
    """Whether a row has to go."""
    temperature: float = 1.0
    """What the logits are divided by."""


class Noise(NamedTuple):
    """Gumbel noise on the logits of one layer."""

    seed: int
    """From 0 to 2**32 - 1."""
    layer: int
    scale: float = 1.0


_NO_NOISE = Noise(0, 0)


def row_noise(
    noise: Noise, positions: Int32[mx.array, "kv_heads rows"], query_heads: int
) -> Float32[mx.array, "query_heads rows"]:
    """Return the noise on the logits of the rows that stand at `positions`, the same in any step and any batch."""
    of_query_heads = mx.repeat(positions, query_heads // positions.shape[0], axis=0)
    return noise.scale * reference.gumbel(noise.seed, noise.layer, mx.arange(query_heads)[:, None], of_query_heads)


def accumulate_scores(
    logits: Float32[mx.array, "batch query_heads rows"],
    scores: Float32[mx.array, "kv_heads total"],
    positions: Int32[mx.array, "kv_heads total"],
    steps: Sequence[Step],
    sinks: Float[mx.array, " query_heads"] | None = None,
    noise: Noise | None = None,
    *,
    backend: str | None = None,
) -> tuple[Float32[mx.array, "kv_heads total"], Int32[mx.array, "kv_heads total"], UInt32[mx.array, "batch kv_heads"]]:
    """Add one token's attention to the scores of each sequence's rows, and drop the row with the lowest score.

    To each row's score comes softmax((logits + noise) / temperature), the mean over the query heads of its KV head; the
    new row begins with its own. Where a row has to go, it is the lowest score's among the rows before the window, of
    equal ones the newest; NaN counts as -infinity. The new row's score and position take its place. One launch.

    Args:
        logits: scaled, of one token per sequence over its rows; what lies beyond a sequence's rows has no meaning.
        scores: of all sequences, whose rooms follow one another without a gap; the rest of a room is copied.
        positions: of the rows, in the same places.
        steps: one for each sequence.
        sinks: logits that join the softmax without a row, one per query head (default: none).
        noise: added to the logits (default: none).
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        The scores and positions, and for each KV head the row dropped, counted from its sequence's first; 0 where none.

    Raises:
        ValueError: shapes or dtypes do not fit, or the steps do not tile the scores.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    _check(logits, scores, positions, steps)
    held = mx.expand_dims(scores, (0, 3)), mx.expand_dims(positions, (0, 3))
    sums, places, dropped = accumulate_held(
        mx.expand_dims(logits, 2), *held, steps, sinks, noise, resolve_backend(backend)
    )
    return mx.squeeze(sums, (0, 3)), mx.squeeze(places, (0, 3)), dropped


def accumulate_held(
    logits: Float32[mx.array, "batch query_heads 1 rows"],
    scores: Float32[mx.array, "1 kv_heads total 1"],
    positions: Int32[mx.array, "1 kv_heads total 1"],
    steps: Sequence[Step],
    sinks: Float[mx.array, " query_heads"] | None,
    noise: Noise | None,
    backend: Backend,
) -> tuple[mx.array, mx.array, mx.array]:
    """Do what `accumulate_scores` does, unchecked, in the shapes in which attention and row buffers hold the arrays.

    The host pays for every check and every reshape, at every token.
    """
    if backend == "reference":
        of_rows = mx.squeeze(logits, 2), mx.squeeze(scores, (0, 3)), mx.squeeze(positions, (0, 3))
        sums, places, dropped = reference.accumulate_scores(*of_rows, steps, sinks, noise)
        return mx.expand_dims(sums, (0, 3)), mx.expand_dims(places, (0, 3)), dropped
    arrays = [logits, scores, positions, *step_arrays(steps, logits.shape[1], sinks, noise)]
    sums, places, dropped = _launch(logits.shape, scores.shape, noise is not None, backend)(arrays)
    return sums, places, dropped


def step_arrays(
    steps: Sequence[Step], query_heads: int, sinks: Float[mx.array, " query_heads"] | None, noise: Noise | None
) -> list[mx.array]:
    """Return what the kernel knows of a step, behind the logits, the scores and the positions.

    Apart from each other: what is the same at every step, or in every layer, is made once for all.
    """
    return [
        _no_sinks(query_heads) if sinks is None else sinks.astype(mx.float32),
        new_numbers(_numbers_of(tuple(steps)), mx.int32),
        _seeds(noise or _NO_NOISE),
    ]


@cache
def _no_sinks(query_heads: int) -> mx.array:
    return numbers((-float("inf"),) * query_heads, mx.float32)


@lru_cache(256)  # the layers of a model usually take the same step
def _numbers_of(steps: tuple[Step, ...]) -> tuple[int, ...]:
    return tuple([number for *others, temperature in steps for number in (*map(int, others), _bits(temperature))])


@lru_cache(256)  # one for each layer
def _seeds(noise: Noise) -> mx.array:
    seed = noise.seed - (1 << 32) if noise.seed >= 1 << 31 else noise.seed
    return numbers((seed, noise.layer, _bits(noise.scale)), mx.int32)


def _bits(number: float) -> int:
    return int(struct.unpack("i", struct.pack("f", number))[0])


@launches
def _launch(logits: tuple[int, ...], scores: tuple[int, ...], noisy: bool, backend: Backend) -> Launch:
    batch, query_heads = logits[:2]
    kv_heads = scores[1]
    threads = 32 * SIMDGROUPS
    return ACCUMULATE_SCORES.prepare(
        inputs=[
            (mx.float32, logits),
            (mx.float32, scores),
            (mx.int32, scores),
            (mx.float32, (query_heads,)),
            (mx.int32, (7 * batch,)),
            (mx.int32, (3,)),
        ],
        template={"GROUP": query_heads // kv_heads, "NOISE": noisy, "SIMDGROUPS": SIMDGROUPS},
        grid=(batch * kv_heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[scores, scores, (batch, kv_heads)],
        output_dtypes=[mx.float32, mx.int32, mx.uint32],
        backend=backend,
    )


def select_rows(
    scores: Float32[mx.array, "batch kv_heads rows"], budget: int, recent: int, *, backend: str | None = None
) -> UInt32[mx.array, "batch kv_heads budget"]:
    """The last `recent` rows and the highest `budget - recent` scores before them: ascending, ties to the lowest row.

    Raises:
        ValueError: budget exceeds the rows, or recent the budget.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    rows = scores.shape[-1]
    if not 0 <= recent <= budget <= rows:
        raise ValueError(f"[select_rows] expected 0 <= recent <= budget <= {rows} rows, got {recent} and {budget}")
    protected = mx.where(mx.arange(rows) >= rows - recent, float("inf"), scores)
    return topk_rows(protected, budget, backend=backend)


def _check(logits: mx.array, scores: mx.array, positions: mx.array, steps: Sequence[Step]) -> None:
    batch, query_heads, rows = logits.shape
    kv_heads, total = scores.shape
    if query_heads % kv_heads or logits.dtype != mx.float32 or scores.dtype != mx.float32:
        raise ValueError(
            f"[accumulate_scores] expected float32 logits of a multiple of {kv_heads} heads and float32 scores, "
            f"got {logits.dtype} {list(logits.shape)} and {scores.dtype}"
        )
    if positions.shape != scores.shape or positions.dtype != mx.int32:
        raise ValueError(
            f"[accumulate_scores] expected positions int32 {list(scores.shape)}, "
            f"got {positions.dtype} {list(positions.shape)}"
        )
    borders = [0, *(step.limit for step in steps)]
    tiled = [step.begin for step in steps] == borders[:-1] and borders[-1] == total
    held = all(step.rows <= min(step.limit - step.begin, rows) for step in steps)
    if len(steps) != batch or not tiled or not held:
        raise ValueError(
            f"[accumulate_scores] expected {batch} steps whose rooms tile {total} places and hold at most {rows} rows "
            f"each, got {list(steps)}"
        )
