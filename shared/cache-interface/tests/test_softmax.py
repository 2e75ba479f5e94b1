"""The attention of tests that run a real model on a CPU."""

import mlx.core as mx
import pytest

from mlx_kv.testing.softmax import attention, numpy_softmax


@pytest.mark.parametrize(("chunk", "mask"), [(1, None), (7, None), (7, "causal"), (40, "causal")])
def test_it_is_mlx_s_attention(chunk, mask):
    q, k, v = (
        mx.random.normal((2, heads, rows, dim), key=mx.random.key(rows + dim))
        for heads, rows, dim in [(6, chunk, 64), (2, 40, 64), (2, 40, 32)]
    )
    right = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
    assert mx.allclose(attention(q, k, v, scale=0.2, mask=mask), right, rtol=0, atol=2e-6)  # sums in another order


def test_it_is_used_inside_the_block_alone():
    own = mx.fast.scaled_dot_product_attention
    with numpy_softmax():
        inside = mx.fast.scaled_dot_product_attention
    assert inside is (attention if mx.default_device().type == mx.DeviceType.cpu else own)
    assert mx.fast.scaled_dot_product_attention is own


def test_sinks_and_masks_that_are_arrays_are_left_to_mlx():
    q, mask = mx.random.normal((1, 2, 5, 32)), mx.tri(5, 5, dtype=mx.bool_)
    for options in ({"mask": mask}, {"mask": None, "sinks": mx.ones(2)}):
        right = mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, **options)
        assert mx.array_equal(attention(q, q, q, scale=1.0, **options), right)
