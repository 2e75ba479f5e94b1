"""The exponentials of a Llama model by NumPy, for tests that run a real one on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models import activations, llama

if TYPE_CHECKING:
    from jaxtyping import Float

_own_attention = mx.fast.scaled_dot_product_attention
_own_swiglu = cast("Callable[[mx.array, mx.array], mx.array]", activations.swiglu)


@contextmanager
def numpy_exponentials() -> Generator[None]:
    """While the block runs, the softmax of attention and the SwiGLU of Llama models are NumPy's on a CPU, in float32.

    MLX's CPU backend computes exp one number at a time, 25 ns each: at a thousand rows that is half of the time of a
    forward pass. With an additive mask or sinks, attention stays MLX's own.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        yield
        return
    with (
        mock.patch.object(mx.fast, "scaled_dot_product_attention", attention),
        mock.patch.object(llama, "swiglu", swiglu),
    ):
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
    additive = isinstance(mask, mx.array) and mask.dtype != mx.bool_
    if additive or sinks is not None or queries.dtype != mx.float32:
        return _own_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    q, k, v = (np.asarray(array, np.float32) for array in (scale * queries, keys, values))
    batch, heads, chunk, dim = q.shape
    kv_heads, rows = k.shape[1:3]
    weights = q.reshape(batch, kv_heads, -1, dim) @ k.swapaxes(2, 3)
    by_head = weights.reshape(batch, heads, chunk, rows)
    if isinstance(mask, mx.array):
        np.copyto(by_head, -np.inf, where=~np.asarray(mask, np.bool_))
    elif mask == "causal":
        np.copyto(by_head[..., rows - chunk :], -np.inf, where=~np.tri(chunk, dtype=np.bool_))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    output = weights @ v
    output /= weights.sum(axis=-1, keepdims=True)
    return mx.array(output.reshape(batch, heads, chunk, -1))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute what mlx-lm's swiglu does."""
    if gate.dtype != mx.float32:
        return _own_swiglu(gate, x)
    g = np.asarray(gate, np.float32)
    with np.errstate(over="ignore"):  # exp of a large number is inf, and the quotient 0
        return mx.array(g / (1 + np.exp(-g))) * x
