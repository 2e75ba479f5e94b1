"""Example's selection in plain MLX, close to the paper: the specification that kernels and policy are tested by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from jaxtyping import Int


def select(rows: int, budget: int, sinks: int) -> Int[mx.array, " budget"]:
    """Return the first `sinks` and the last budget - sinks of `rows` rows, ascending."""
    return mx.concatenate([mx.arange(sinks), mx.arange(rows - (budget - sinks), rows)])
