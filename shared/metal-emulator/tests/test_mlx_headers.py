"""Kernels from the Metal headers that the mlx package ships, against float64 NumPy."""

import numpy as np
import pytest

from mlx_kv_emulator import run_kernel_function

HEAD = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
QUANTIZED = "".join(
    f'#include "mlx/backend/metal/kernels/{name}.h"\n' for name in ("steel/gemm/gemm", "quantized_utils", "quantized")
)
FLOAT32 = dict(rtol=2e-6, atol=2e-6)  # sums of at most a few hundred float32 terms, in another order


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def softmax64(x):
    x = x.astype(np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("mode", ["run", "check"])
@pytest.mark.parametrize(("rows", "width"), [(3, 256), (2, 77)])
def test_softmax(rng, rows, width, mode):
    x = rng.normal(size=(rows, width)).astype(np.float32) * 3
    (y,) = run_kernel_function(
        HEAD + '#include "mlx/backend/metal/kernels/softmax.h"\n',
        "softmax_single_row",
        [x, np.empty_like(x), np.int32(width)],
        template="float, float",
        outputs=[1],
        threadgroups=(rows, 1, 1),
        threadgroup=(64, 1, 1),
        mode=mode,
    )
    np.testing.assert_allclose(y, softmax64(x), **FLOAT32)


@pytest.mark.parametrize("mode", ["run", "check"])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_vector(rng, causal, mode):
    heads, kv_heads, rows, head_dim = 4, 2, 45, 64
    q = rng.normal(size=(heads, 1, head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_heads, rows, head_dim)).astype(np.float32)
    scale = np.float32(head_dim**-0.5)
    strides = [np.uint64(rows * head_dim), np.uint64(head_dim)] * 2
    scalars = [np.int32(heads // kv_heads), np.int32(rows), *strides, scale]
    (o,) = run_kernel_function(
        HEAD + '#include "mlx/backend/metal/kernels/sdpa_vector.h"\n',
        "sdpa_vector",
        [q, k, v, np.empty_like(q), *scalars, *[None] * 7],
        template=f"float, {head_dim}",
        outputs=[3],
        threadgroups=(heads, 1, 1),
        threadgroup=(1024, 1, 1),
        function_constants={"do_causal": causal, "has_mask": False, "has_sinks": False, "query_transposed": False},
        mode=mode,
    )
    wide = np.repeat(k, 2, 0).astype(np.float64), np.repeat(v, 2, 0).astype(np.float64)
    expected = softmax64(q.astype(np.float64) @ wide[0].swapaxes(1, 2) * float(scale)) @ wide[1]
    np.testing.assert_allclose(o, expected, **FLOAT32)


@pytest.mark.parametrize("mode", ["run", "check"])
@pytest.mark.parametrize("bits", [2, 4])
def test_quantised_matrix_vector_product(rng, bits, mode):
    columns, rows, group = 512, 32, 64
    per_word = 32 // bits
    codes = rng.integers(0, 2**bits, size=(rows, columns)).astype(np.uint32)
    words = (
        (codes.reshape(rows, -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)).sum(-1).astype(np.uint32)
    )
    scales, biases = rng.normal(size=(2, rows, columns // group)).astype(np.float32)
    x = rng.normal(size=columns).astype(np.float32)
    no_batch = [np.int32(0), np.zeros(1, np.int32), np.zeros(1, np.int64)]
    (y,) = run_kernel_function(
        HEAD + QUANTIZED,
        "affine_qmv_fast",
        [words, scales, biases, x, np.empty(rows, np.float32), np.int32(columns), np.int32(rows), *no_batch, *no_batch]
        + [np.zeros(1, np.int64)] * 2,
        template=f"float, {group}, {bits}, false",
        outputs=[4],
        threadgroups=(1, rows // 8, 1),
        threadgroup=(32, 2, 1),
        mode=mode,
    )
    weights = codes * np.repeat(scales, group, 1).astype(np.float64) + np.repeat(biases, group, 1)
    np.testing.assert_allclose(y, weights @ x, rtol=1e-5, atol=1e-4)  # 512 float32 terms of size up to 10


@pytest.mark.parametrize("mode", ["run", "check"])
def test_sort(rng, mode):
    x = rng.normal(size=(2, 200)).astype(np.float32)
    (y,) = run_kernel_function(
        HEAD + '#include "mlx/backend/metal/kernels/sort.h"\n',
        "block_sort",
        [x, np.empty_like(x), *(np.int32(n) for n in (200, 1, 1, 200, 200))],
        template="float, float, false, 64, 4",
        outputs=[1],
        threadgroups=(1, 2, 1),
        threadgroup=(64, 1, 1),
        mode=mode,
    )
    np.testing.assert_array_equal(y, np.sort(x, -1))
