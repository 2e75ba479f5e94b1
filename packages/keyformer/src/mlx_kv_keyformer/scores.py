"""Keyformer's noise, scores and selection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_kv_kernels.accumulate import Noise, row_noise, select_rows

from . import reference

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float, Float32, Int, UInt32


def noise(
    positions: Int[mx.array, "kv_heads rows"], query_heads: int, seed: int, layer: int
) -> Float32[mx.array, "query_heads rows"]:
    """Return the Gumbel noise on the logits of the rows whose tokens stand at `positions`.

    It depends on the seed, the layer, the query head and the position alone, so it is the same in any step, any chunks
    and any batch.

    Raises:
        ValueError: if query_heads is not a multiple of the KV heads.
    """
    _expect(query_heads % len(positions) == 0, f"query_heads a multiple of {len(positions)}", query_heads)
    return row_noise(Noise(seed, layer), positions, query_heads)


def scores(
    logits: Float[mx.array, "batch query_heads queries rows"],
    noise: Float[mx.array, "batch query_heads #queries rows"],
    tau: float,
) -> Float32[mx.array, "batch query_heads rows"]:
    """Return what queries add to the score of each row: sums of softmax((logits + noise) / tau).

    The policy computes the same without holding the logits of a prompt.

    Args:
        logits: scaled, -inf where a query does not see a row.
        noise: what broadcasts to the logits.
        tau: the temperature, above 0.

    Raises:
        ValueError: if tau is not above 0.
    """
    _expect(tau > 0, "tau above 0", tau)
    return reference.scores(logits, noise, tau)


def select(
    scores: Float32[mx.array, "batch kv_heads rows"], budget: int, recent: int, *, backend: str | None = None
) -> UInt32[mx.array, "batch kv_heads budget"]:
    """Select the highest `budget - recent` scores before the last `recent` rows, and these.

    Args:
        scores: one of each row.
        budget: rows to keep.
        recent: last rows, which are always kept.
        backend: "metal", "cuda", "emulator", "reference" or "auto" (default: MLX_KV_BACKEND, else auto).

    Returns:
        Row indices, ascending. Equal scores go to the lowest row.

    Raises:
        ValueError: if recent exceeds the budget, or the budget the rows.
        UnavailableBackendError: if the backend asked for cannot run here.
    """
    rows = scores.shape[-1]
    _expect(0 < budget <= rows, f"budget from 1 to {rows} rows", budget)
    _expect(0 <= recent <= budget, f"recent from 0 to budget {budget}", recent)
    return select_rows(scores, budget, recent, backend=backend)


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[keyformer] expected {expected}, got {got}")
