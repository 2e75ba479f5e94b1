"""The kernels of mlx_lm, run as they are, against float64 NumPy."""

import importlib.util
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_kv_emulator

# What one rounding to the type may add, relative to the largest value; intermediate roundings add as many again.
ULP = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@pytest.fixture(scope="module")
def kernels():
    """mlx_lm.kernels with mx.fast.metal_kernel replaced, loaded without the rest of mlx_lm, which takes seconds."""
    folder = Path(importlib.util.find_spec("mlx_lm").origin).parent / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", mlx_kv_emulator.metal_kernel)
        spec = importlib.util.spec_from_file_location("emulated_kernels", folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "emulated_kernels", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(params=["run", "check", "strict"])
def mode(request):
    with mlx_kv_emulator.settings(mode=request.param):
        yield request.param


@pytest.fixture(params=[mx.float32, mx.float16, mx.bfloat16], ids=str)
def dtype(request):
    mx.random.seed(0)
    return request.param


def wide(array):
    return np.asarray(array.astype(mx.float32)).astype(np.float64)


def rms_norm(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def close(got, expected, roundings=2):
    assert got.shape == expected.shape
    tolerance = (roundings * ULP[got.dtype] + 1e-6) * np.abs(expected).max()  # 1e-6: float32 sums and rsqrt
    np.testing.assert_allclose(wide(got), expected, rtol=0, atol=tolerance)


TOKENS, HEADS, KV_HEADS, HEAD_DIM = 5, 8, 2, 128


def query_and_key(qkvg):
    x = wide(qkvg)[..., : (HEADS + KV_HEADS) * HEAD_DIM].reshape(2, TOKENS, HEADS + KV_HEADS, HEAD_DIM)
    x = rms_norm(x, 1e-6)
    return x[:, :, :HEADS] * 0.3, x[:, :, HEADS:]


def test_qk_norm(kernels, mode, dtype):
    qkvg = mx.random.normal((2, TOKENS, 2 * (HEADS + KV_HEADS) * HEAD_DIM)).astype(dtype)
    q, k = kernels.qk_norm(qkvg, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, eps=1e-6, query_scale=0.3)
    for got, expected in zip((q, k), query_and_key(qkvg), strict=True):
        close(got, expected)


def test_qk_norm_rope(kernels, mode, dtype):
    qkvg = mx.random.normal((2, TOKENS, 2 * (HEADS + KV_HEADS) * HEAD_DIM)).astype(dtype)
    sizes = dict(n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    q, k = kernels.qk_norm_rope(qkvg, **sizes, eps=1e-6, query_scale=0.3, rope_base=10000.0, offset=37)
    angle = (37 + np.arange(TOKENS))[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    turn = np.exp(1j * angle)[:, None]
    for got, x in zip((q, k), query_and_key(qkvg), strict=True):
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
        got32 = np.abs(wide(got) - expected).max()
        assert got32 <= (3 * ULP[dtype] + 2e-5) * np.abs(expected).max()  # 2e-5: float32 angles up to 41


@pytest.mark.parametrize("next_norm", [True, False])
def test_norm_add_norm(kernels, mode, dtype, next_norm):
    d = 1024
    branch, weight = mx.random.normal((3, d)).astype(dtype), mx.random.normal((d,)).astype(dtype)
    stream, alpha, beta = mx.random.normal((3, d)), mx.random.normal((d,)), mx.random.normal((d,))
    norm = nn.RMSNorm(d, 1e-5)
    norm.weight = mx.random.normal((d,)).astype(dtype)
    new_stream, normed = kernels.norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=weight, post_eps=1e-6, next_norm=norm if next_norm else None
    )
    expected = wide(alpha) * wide(stream) + wide(beta) * rms_norm(wide(weight) * wide(branch), 1e-6)
    tolerance = (2 * ULP[dtype] + 1e-6) * np.abs(expected).max()
    np.testing.assert_allclose(wide(new_stream), expected, rtol=0, atol=tolerance)
    if next_norm:
        close(normed, rms_norm(expected, 1e-5) * wide(norm.weight), roundings=4)
        assert mx.array_equal(kernels.pre_norm(new_stream, norm, dtype=dtype), normed)


def test_post_expert_norm_combine(kernels, mode, dtype):
    d, experts = 1024, 8
    x, weight = mx.random.normal((4, experts, d)).astype(dtype), mx.random.normal((d,)).astype(dtype)
    shares = mx.random.uniform(shape=(4, experts))
    got = kernels.post_expert_norm_combine(x, shares, norm_weight=weight, eps=1e-6)
    expected = (rms_norm(wide(x) * wide(weight), 1e-6) * wide(shares)[..., None]).sum(1)
    close(got, expected, roundings=experts)  # the sum is rounded to the type after every expert


def test_rms_norm_sigmoid_gate(kernels, mode, dtype):
    x = mx.random.normal((2, 3, 4, HEAD_DIM)).astype(dtype).transpose(0, 2, 1, 3)  # read through its strides
    gate = mx.random.normal((2, 3, 4 * HEAD_DIM)).astype(dtype)
    got = kernels.rms_norm_sigmoid_gate(x, gate, eps=1e-6)
    normed = rms_norm(wide(x), 1e-6).transpose(0, 2, 1, 3).reshape(2, 3, -1)
    close(got, normed / (1 + np.exp(-wide(gate))))


def test_expert_routing(kernels, mode):
    mx.random.seed(0)
    experts, top = 128, 8
    logits, bias = mx.random.normal((7, experts)), mx.random.normal((experts,)) * 0.1
    indices, weights = kernels.expert_routing(logits, bias, top_k=top, multiplier=1.0, score_eps=1e-20, route_scale=2.5)
    scores = 1 / (1 + np.exp(-wide(logits)))
    expected = np.argsort(-(scores + wide(bias)), -1)[:, :top]
    np.testing.assert_array_equal(np.asarray(indices), expected)
    chosen = np.take_along_axis(scores, expected, -1)
    close(weights, chosen / chosen.sum(-1, keepdims=True) * 2.5)
