"""The exponentials of tests that run a real model on a CPU."""

import mlx.core as mx
import pytest
from mlx_lm.models import activations, llama

from mlx_kv.testing.exponentials import attention, numpy_exponentials, swiglu

CAUSAL = mx.tri(7, 40, 33, dtype=mx.bool_)
BATCH = mx.arange(40) >= mx.array([3, 0])[:, None, None, None]  # as for left padding


@pytest.mark.parametrize(
    ("chunk", "mask"),
    [(1, None), (7, None), (7, "causal"), (40, "causal"), (7, CAUSAL), (1, BATCH)],
)
def test_attention_is_mlx_s(chunk, mask):
    q, k, v = (
        mx.random.normal((2, heads, rows, dim), key=mx.random.key(rows + dim))
        for heads, rows, dim in [(6, chunk, 64), (2, 40, 64), (2, 40, 32)]
    )
    right = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
    assert mx.allclose(attention(q, k, v, scale=0.2, mask=mask), right, rtol=0, atol=2e-6)  # sums in another order


def test_swiglu_is_mlx_lm_s():
    gate, x = 50 * mx.random.normal((3, 5, 64)), mx.random.normal((3, 5, 64))
    gate[0, 0, 0], gate[0, 0, 1] = -200, 200
    right = activations.swiglu(gate, x)
    assert mx.allclose(swiglu(gate, x), right, rtol=1e-6, atol=1e-6)  # another exp
    half = gate.astype(mx.float16), x.astype(mx.float16)
    assert mx.array_equal(swiglu(*half), activations.swiglu(*half))


def test_they_are_used_inside_the_block_alone():
    own = mx.fast.scaled_dot_product_attention, llama.swiglu
    with numpy_exponentials():
        inside = mx.fast.scaled_dot_product_attention, llama.swiglu
    assert inside == ((attention, swiglu) if mx.default_device().type == mx.DeviceType.cpu else own)
    assert (mx.fast.scaled_dot_product_attention, llama.swiglu) == own


def test_sinks_and_additive_masks_are_left_to_mlx():
    q, mask = mx.random.normal((1, 2, 5, 32)), mx.random.normal((5, 5))
    for options in ({"mask": mask}, {"mask": None, "sinks": mx.ones(2)}):
        right = mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, **options)
        assert mx.array_equal(attention(q, q, q, scale=1.0, **options), right)
