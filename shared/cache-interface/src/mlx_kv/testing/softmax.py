"""Attention on a CPU with NumPy's exp, for tests that run a real model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

_own_attention = mx.fast.scaled_dot_product_attention


@contextmanager
def numpy_softmax() -> Generator[None]:
    """While the block runs, the softmax of attention is NumPy's on a CPU.

    MLX's CPU backend computes exp one number at a time, 20 ns each: with a thousand rows that is a third of the time of
    a forward pass. Where a mask is an array or there are sinks, attention stays MLX's own.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        yield
        return
    with mock.patch.object(mx.fast, "scaled_dot_product_attention", attention):
        yield


def attention(
    queries: Float[mx.array, "batch query_heads chunk key_dim"],
    keys: Float[mx.array, "batch kv_heads rows key_dim"],
    values: Float[mx.array, "batch kv_heads rows value_dim"],
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> Float[mx.array, "batch query_heads chunk value_dim"]:
    """Compute what mx.fast.scaled_dot_product_attention does."""
    if isinstance(mask, mx.array) or sinks is not None or queries.dtype != mx.float32:
        return _own_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    batch, heads, chunk, dim = queries.shape
    kv_heads, rows = keys.shape[1:3]
    grouped = (scale * queries).reshape(batch, kv_heads, heads // kv_heads * chunk, dim)
    weights = np.array(grouped @ keys.swapaxes(2, 3), np.float32).reshape(batch, heads, chunk, rows)
    if mask == "causal":
        weights[..., rows - chunk :] += np.triu(np.full((chunk, chunk), -np.inf, np.float32), 1)
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    output = mx.array(weights.reshape(batch, kv_heads, -1, rows)) @ values
    return output.reshape(batch, heads, chunk, values.shape[3])
