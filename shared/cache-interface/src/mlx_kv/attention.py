"""Attention over the rows of a store.

The reference makes rows dense, then calls MLX's own scaled dot product attention. A decode step goes to an installed
backend of the entry-point group `mlx_kv.attention` that covers it and reads the packed rows as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import mlx.core as mx

from .layout import Layout
from .rows import Span
from .store import Store

if TYPE_CHECKING:
    from jaxtyping import Float

Mask = mx.array | str | None
GROUP = "mlx_kv.attention"

_T = TypeVar("_T")
_log = logging.getLogger("mlx_kv")


class DecodeAttention(Protocol):
    """What an entry point of the group `mlx_kv.attention` names."""

    @staticmethod
    def attend(
        queries: mx.array, layout: Layout, scale: float, sinks: mx.array | None, logits: bool
    ) -> tuple[mx.array, mx.array | None] | str:
        """Attend with one query row per sequence over all of its rows; see `decode`.

        Or, before computing anything, return a sentence that says why not: the next backend is asked, then the
        reference.
        """
        ...

    @staticmethod
    def exchange(
        queries: mx.array, layout: Layout, scale: float, of_scores: Sequence[mx.array], noisy: bool
    ) -> list[mx.array] | str:
        """Attend likewise and take note of it; see the function `exchange`. Or say why not."""
        ...


def decode(
    store: Store,
    queries: Float[mx.array, "batch query_heads 1 key_dim"],
    scale: float,
    sinks: Float[mx.array, " query_heads"] | None = None,
    logits: bool = False,
) -> tuple[mx.array, mx.array | None] | None:
    """Attend with one query row per sequence, which sees all rows held, on an installed backend.

    Returns:
        The output [batch, query_heads, 1, value_dim] and, if asked for, the logits [batch, query_heads, 1, rows] as
        `logits` computes them; None if no backend is installed or covers the case, each reason being logged once, and
        where MLX's own attention does as well: over one sequence of dense rows.
    """
    if not installed():
        return None
    if store.in_place and not logits and len(store.lengths) == 1:
        _log_once("dense rows of one sequence are left to MLX's own attention, which reads them where they lie")
        return None
    layout = store.layout()
    if layout is None:
        return None
    return _first_answer(layout, lambda backend: backend.attend(queries, layout, scale, sinks, logits))


def exchange(
    queries: Float[mx.array, "1 query_heads 1 key_dim"],
    layout: Layout,
    scale: float,
    of_scores: Sequence[mx.array],
    noisy: bool,
) -> list[mx.array] | None:
    """Attend to all rows of an `exchanged_format`, and add the attention to their scores; traceable.

    Args:
        queries: one row, which sees all rows.
        layout: the rows.
        scale: what the logits are multiplied with.
        of_scores: the rows' scores and positions, as `accumulate_held` takes them, and `step_arrays`.
        noisy: whether the step has noise.

    Returns:
        The output, scores, positions, the overdue rows and their places, the newest row now the last of these; None if
        no backend covers the case.
    """
    return _first_answer(layout, lambda backend: backend.exchange(queries, layout, scale, of_scores, noisy))


def _first_answer(layout: Layout, ask: Callable[[DecodeAttention], _T | str]) -> _T | None:
    """Return what the first backend answers that does not say why not; that is logged."""
    for name, backend in _backends().items():
        answered = ask(backend)
        if not isinstance(answered, str):
            return answered
        _log_once(f"{name} attention is not used for {layout.format.name} rows: {answered}")
    return None


def installed() -> bool:
    """Tell whether there is any backend."""
    return bool(_backends())


@cache
def _backends() -> dict[str, DecodeAttention]:
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: cast("DecodeAttention", point.load()) for point in points}


@cache
def _log_once(message: str) -> None:
    _log.info(message)


def attend(
    store: Store,
    queries: Float[mx.array, "batch query_heads chunk key_dim"],
    scale: float,
    mask: Mask,
    sinks: Float[mx.array, " query_heads"] | None = None,
) -> Float[mx.array, "batch query_heads chunk value_dim"]:
    """Attend over the rows of a store, those of the present chunk included.

    Args:
        store: the rows.
        queries: post-RoPE queries of the chunk.
        scale: what the scores are multiplied with.
        mask: None (every row is visible), "causal" (the chunk is the newest rows), or an array that broadcasts to
            [batch, query_heads, chunk, rows]: boolean, true where visible, or added to the scores.
        sinks: one logit per query head that joins the softmax without a value (gpt_oss).
    """
    keys, values = store.dense()
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def logits(
    store: Store, queries: Float[mx.array, "batch query_heads chunk key_dim"], scale: float, mask: Mask
) -> Float[mx.array, "batch query_heads chunk rows"]:
    """Return the scaled logits of `attend`'s softmax in float32, -inf where a row is not visible.

    Arguments are those of `attend`; "causal" is not among the masks.
    """
    keys = store.dense()[0].astype(mx.float32)
    batch, heads, chunk, dim = queries.shape
    grouped = queries.astype(mx.float32).reshape(batch, keys.shape[1], -1, dim)  # by KV head
    scores = (scale * grouped @ keys.swapaxes(2, 3)).reshape(batch, heads, chunk, -1)
    return mx.where(mask, scores, -float("inf")) if isinstance(mask, mx.array) else scores


def ragged_mask(held: Sequence[int], spans: Sequence[Span], chunk: int, rows: int) -> mx.array:
    """Return what each query of a chunk may see where sequences differ in length: boolean [batch, 1, chunk, rows].

    Args:
        held: rows of each sequence, those of the chunk included.
        spans: the real tokens of the chunk in each sequence.
        chunk: queries per sequence.
        rows: rows of the dense view, the longest sequence's.
    """
    # The query at place i of the chunk is token i - first of the span; it sees the rows held before the span, and the
    # span up to itself.
    before = mx.array([n - last for n, (_, last) in zip(held, spans, strict=True)])[:, None, None, None]
    visible = before + mx.arange(1, chunk + 1)[:, None]
    # Padding's outputs go nowhere, but a softmax over nothing would be NaN: it is shown the first row.
    return mx.arange(rows) < mx.maximum(visible, 1)
