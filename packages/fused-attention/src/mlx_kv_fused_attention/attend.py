"""Decode attention over the rows that a store holds, packed or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import mlx.core as mx

from mlx_kv.layout import Extent, Format, Layout
from mlx_kv_kernels import resolve_backend
from mlx_kv_kernels.kernel import CONSTANT_BELOW
from mlx_kv_kernels.launch import Launch, launches
from mlx_kv_kernels.numbers import new_numbers, numbers

from . import reference
from .finish import OF_SCORES, finish_exchange
from .merge import launch_merge
from .plan import Plan, plan, refusal, splits_of
from .splits import SIMDGROUPS

if TYPE_CHECKING:
    from jaxtyping import Float, Float32


Finish = Literal["merge", "exchange", "exchange with noise"]  # what the second launch does


class Attention(NamedTuple):
    """An output with what policies score rows by."""

    output: Float[mx.array, "batch query_heads 1 value_dim"]
    logits: Float32[mx.array, "batch query_heads rows"]
    """scale * q.k of every row, -inf beyond a sequence's length."""
    lse: Float32[mx.array, "batch query_heads"]
    """Natural logarithm of the softmax's denominator, the sink included: probabilities are exp(logits - lse)."""


def attend(
    queries: Float[mx.array, "batch query_heads 1 key_dim"],
    layout: Layout,
    scale: float,
    sinks: Float[mx.array, " query_heads"] | None = None,
    *,
    logits: bool = False,
    splits: int | None = None,
    backend: str | None = None,
) -> mx.array | Attention:
    """Attend with one query row per sequence over all rows of a layout, in two launches.

    Split-KV attention with head packing: threadgroups share out the rows of each KV head, each reads its rows once for
    all query heads of the group, and a second launch merges them. Deterministic: same inputs and splits, same bits.

    Args:
        queries: post-RoPE queries in the dtype of the layout's rows.
        layout: where the rows are (`store.layout()`).
        scale: what the scores are multiplied with.
        sinks: one logit per query head that joins the softmax without a value (gpt_oss).
        logits: also return the logits and their logsumexp.
        splits: splits of the rows of each KV head (default: chosen from rows, heads, batch and the device's cores).
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        The output [batch, query_heads, 1, value_dim] in the dtype of the queries, zero for a sequence without rows;
        with `logits` an Attention.

    Raises:
        ValueError: there is no kernel for these shapes or dtypes, or splits is not positive.
        UnavailableBackendError: the backend asked for cannot run here.
    """
    reason = refusal(queries, layout, sinks)
    if reason is not None:
        raise ValueError(f"[fused_attention] {reason}")
    if splits is not None and splits < 1:
        raise ValueError(f"[fused_attention] expected splits of 1 or more, got {splits}")
    backend = resolve_backend(backend)
    if backend == "reference":
        full = reference.attend(queries, *layout.dense(), layout.extent.rows, scale, sinks)
        return Attention(*full) if logits else full[0]
    outputs = launch_attend(queries, layout, scale, sinks, logits, splits, backend)
    if not logits:
        return outputs[0]
    output, scores = outputs
    scores = mx.squeeze(scores, 2)
    lse = mx.logsumexp(scores, axis=-1)
    return Attention(output, scores, lse if sinks is None else mx.logaddexp(lse, sinks.astype(mx.float32)))


def launch_attend(
    queries: mx.array,
    layout: Layout,
    scale: float,
    sinks: mx.array | None,
    logits: bool,
    splits: int | None,
    backend: str,
) -> list[mx.array]:
    """Launch the kernels for a case not refused; the output and, if asked for, logits [batch, query_heads, 1, rows]."""
    launch, places = _prepare(layout.format, layout.extent, queries.shape[1], scale, logits, splits, backend)
    own_sinks = () if sinks is None else (sinks,)
    return launch([queries, new_numbers(places, mx.int32), *layout.arrays, *own_sinks])


def launch_exchange(
    queries: mx.array,
    layout: Layout,
    scale: float,
    of_scores: Sequence[mx.array],
    noisy: bool,
    backend: str,
) -> list[mx.array]:
    """Launch the kernels of a step in which a row takes the place of another; what `finish_exchange` returns."""
    case = layout.format, layout.extent, queries.shape[1], scale, True, None, backend
    launch, places = _prepare(*case, finish="exchange with noise" if noisy else "exchange")
    # They are the same at every step, so that a compiled function may hold them.
    return launch([queries, numbers(places, mx.int32), *layout.arrays, *of_scores])


@launches  # the layers of a model usually agree, and what is worked out for one serves all
def _prepare(
    format: Format,
    extent: Extent,
    query_heads: int,
    scale: float,
    logits: bool,
    splits: int | None,
    backend: str,
    finish: Finish = "merge",
) -> tuple[Launch, tuple[int, ...]]:
    """Return the launches, and the numbers of every sequence as sequence.metal reads them."""
    noisy = finish == "exchange with noise"
    of_layout, rows = plan(format, query_heads, scale, logits, noisy, backend), extent.rows
    tiles = extent.tiles if of_layout.tiled else ((0, 0),) * len(rows)
    chosen = splits_of(format, rows, tiles, of_layout.threadgroups_per_core, splits)
    logit_rows = max(rows) if logits else 0
    ragged = len(set(rows)) > 1
    launch = _launcher(
        of_layout, len(rows), query_heads, chosen.rows + chosen.tiles, logit_rows, ragged, backend, finish
    )
    own: list[int] = []
    for count, tile, place in zip(rows, tiles, extent.places, strict=True):
        own += (count, *tile, logit_rows, chosen.rows, *place)
    padding = [0] * (CONSTANT_BELOW - len(own))  # fewer numbers would be in another address space
    return launch, (*own, *padding)


@launches
def _launcher(
    of_layout: Plan,
    batch: int,
    query_heads: int,
    splits: int,
    logit_rows: int,
    ragged: bool,
    backend: str,
    finish: Finish,
) -> Launch:
    """Return both launches as one, of queries, places, the layout's arrays and what is wanted besides.

    That is sinks, if any, for a merge, else scores, positions and `step_arrays`.
    """
    kernel, heads = of_layout.kernel, batch * query_heads
    kv_heads, dim = query_heads // int(of_layout.template["GROUP"]), int(of_layout.template["VALUE_DIM"])  # type: ignore[call-overload]
    wanted = [(heads, splits, dim + 1)] + ([(batch, query_heads, 1, logit_rows)] if logit_rows else [])

    format = of_layout.format
    ends = 2 + len(format.inputs)
    of_noise = [OF_SCORES.index(name) for name in kernel.input_names[ends:]]
    of_basis = [kernel.input_names.index(name) for name in format.basis_inputs]
    filled = -float("inf") if logit_rows and ragged else None  # beyond a shorter sequence's rows nothing is written

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        queries, others = arrays[0], arrays[ends:]
        partial, *logits = kernel(
            inputs=[*arrays[:ends], *[others[i] for i in of_noise]],
            template=of_layout.template,
            grid=(32 * SIMDGROUPS * splits, kv_heads, batch),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=wanted,
            output_dtypes=[mx.float32] * len(wanted),
            init_value=filled,
            threadgroups_per_core=of_layout.threadgroups_per_core,
            backend=backend,
        )
        if finish != "merge":
            return finish_exchange(partial, logits[0], arrays[2:ends], others, backend)
        own_sinks = others[0] if others else None
        basis = [arrays[i] for i in of_basis]
        shape = (batch, query_heads, 1, dim)
        return [launch_merge(partial, own_sinks, shape, queries.dtype, backend, format, basis), *logits]

    return Launch(launch, compiles=backend != "emulator")
