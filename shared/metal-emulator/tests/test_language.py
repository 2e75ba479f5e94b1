"""What MSL means: SIMD functions, matrices, vectors, atomics, types. References in NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_kv_emulator
from mlx_kv_emulator import metal_kernel

LANES = np.arange(32)


def run(source, *arrays, shape=(32,), dtype=mx.float32, threads=32, header="", **options):
    names = "xyz"[: len(arrays)]
    kernel = metal_kernel(
        "language", list(names), ["o"], "uint i = thread_position_in_grid.x;\n" + source, header=header
    )
    return kernel(
        inputs=list(arrays),
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        **options,
    )[0]


@pytest.fixture(params=["run", "check", "strict"])
def mode(request):
    with mlx_kv_emulator.settings(mode=request.param):
        yield request.param


X = np.random.default_rng(0).integers(-8, 8, 32)  # small integers: every sum and product of few is exact
SIMD = {
    "simd_sum(v)": np.full(32, X.sum()),
    "simd_max(v)": np.full(32, X.max()),
    "simd_min(v)": np.full(32, X.min()),
    "simd_product(v)": np.full(32, X.prod()),
    "simd_prefix_inclusive_sum(v)": X.cumsum(),
    "simd_prefix_exclusive_sum(v)": X.cumsum() - X,
    "simd_shuffle(v, (i * 7) % 32)": X[LANES * 7 % 32],
    "simd_broadcast(v, 5)": np.full(32, X[5]),
    "simd_broadcast_first(v)": np.full(32, X[0]),
    "simd_shuffle_xor(v, 9)": X[LANES ^ 9],
    "simd_shuffle_down(v, 3)": np.where(LANES + 3 < 32, X[(LANES + 3) % 32], X),
    "simd_shuffle_up(v, 3)": np.where(LANES >= 3, X[LANES - 3], X),
    "simd_shuffle_rotate_down(v, 3)": np.roll(X, -3),
    "simd_shuffle_rotate_up(v, 3)": np.roll(X, 3),
    "simd_shuffle_and_fill_up(v, v * 100, 3)": np.where(LANES >= 3, X[LANES - 3], X[LANES - 3] * 100),
    "simd_shuffle_and_fill_down(v, v * 100, 3)": np.where(
        LANES + 3 < 32, X[(LANES + 3) % 32], X[(LANES + 3) % 32] * 100
    ),
    "float(simd_any(v > 6))": np.full(32, (X > 6).any()),
    "float(simd_all(v > -9))": np.full(32, 1),
    "float(popcount(uint((ulong)simd_ballot(v > 0))))": np.full(32, (X > 0).sum()),
    "quad_sum(v)": np.repeat(X.reshape(8, 4).sum(1), 4),
    "quad_max(v)": np.repeat(X.reshape(8, 4).max(1), 4),
    "quad_shuffle_xor(v, 1)": X[LANES ^ 1],
    "quad_broadcast(v, 2)": X[LANES // 4 * 4 + 2],
}


@pytest.mark.parametrize("expression", SIMD)
def test_simd_functions(expression):
    with mlx_kv_emulator.settings(mode="check"):
        got = run(f"float v = x[i];\no[i] = {expression};", mx.array(X.astype(np.float32)))
    np.testing.assert_array_equal(np.asarray(got), SIMD[expression].astype(np.float32))


def test_lanes_outside_a_branch_do_not_take_part():
    kernel = metal_kernel(
        "part", ["x"], ["o"], "uint i = thread_position_in_grid.x; float s = 0;\n"
        "if (i < 10) s = simd_sum(x[i]);\no[i] = s;", allow=("divergence",),
    )  # fmt: skip
    x = mx.arange(32.0)
    run = dict(inputs=[x], output_shapes=[(32,)], output_dtypes=[mx.float32], grid=(32, 1, 1), threadgroup=(32, 1, 1))
    assert kernel(**run)[0].tolist() == [45.0] * 10 + [0.0] * 22


@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
def test_matrix_product(mode, kind):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-4, 5, size=(2, 8, 8)).astype(np.float32)  # exact in all three types
    source = f"""
    simdgroup_matrix<{kind}, 8, 8> a, b;
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float>(2.0f);
    threadgroup {kind} left[64], right[64];
    for (uint k = i; k < 64; k += 32) {{ left[k] = {kind}(x[k]); right[k] = {kind}(y[k]); }}
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(a, left);
    simdgroup_load(b, right, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, o, 8);
    """
    got = run(source, mx.array(a), mx.array(b), shape=(8, 8))
    np.testing.assert_array_equal(np.asarray(got), a @ b.T + 2)


def test_vectors(mode):
    source = """
    float4 v = float4(x[0], float2(x[1], x[2]), x[3]);
    v.xy = v.yx;
    float3 w = max(v.xyz, float3(1.5f));
    half2 h = half2(half(v.x), half(v.w));
    packed_float3 p = w;
    uint2 u = uint2(as_type<uint>(h), 7u);
    if (i == 0) {
        o[0] = dot(w, float3(1, 10, 100));
        o[1] = float(as_type<half2>(u.x).y);
        o[2] = p[2];
        o[3] = clamp(v, float4(0.0f), float4(2.0f)).w;
    }
    """
    got = run(
        source,
        mx.array([0.0, 1.0, 2.0, 3.0]),
        shape=(4,),
    )
    assert got.tolist() == [1.5 + 15 + 200, 3.0, 2.0, 2.0]


def test_atomics(mode):
    kernel = metal_kernel(
        "atomics", ["x"], ["sum", "top"], "uint i = thread_position_in_grid.x;\n"
        "atomic_fetch_add_explicit(sum, x[i], memory_order_relaxed);\n"
        "atomic_fetch_max_explicit(top, x[i], memory_order_relaxed);", atomic_outputs=True,
    )  # fmt: skip
    x = np.random.default_rng(2).integers(0, 1000, 100)
    got = kernel(inputs=[mx.array(x, mx.int32)], output_shapes=[(1,), (1,)], output_dtypes=[mx.int32] * 2, init_value=0,
                 grid=(100, 1, 1), threadgroup=(64, 1, 1))  # fmt: skip
    assert [int(g) for g in got] == [x.sum(), x.max()]


DTYPES = [mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64]
DTYPES += [mx.float16, mx.bfloat16, mx.float32, mx.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_passes_through(mode, dtype):
    if mode == "strict" and dtype == mx.complex64:
        with pytest.raises(
            mlx_kv_emulator.CompileError
        ):  # clang cannot copy a class out of an address space: see README
            run("o[i] = T(x[i]);", mx.zeros(32, dtype), dtype=dtype, template=[("T", dtype)])
        return
    x = mx.arange(-4, 28).astype(dtype)
    got = run("o[i] = T(x[i]);", x, dtype=dtype, template=[("T", dtype)])
    assert got.dtype == dtype
    assert mx.array_equal(got, x)


def test_char_is_signed():
    assert run("char c = char(x[i]); o[i] = c;", mx.full((32,), -3.0)).tolist() == [-3.0] * 32


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_half_precision_rounds_after_every_operation(name):
    dtype = mx.float16 if name == "half" else mx.bfloat16
    a, b, c = (mx.random.normal((32,), key=mx.random.key(k)).astype(dtype) for k in range(3))
    got = run("o[i] = x[i] * y[i] + z[i];", a, b, c, dtype=dtype, contract="off")
    product = (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(got, (product.astype(mx.float32) + c.astype(mx.float32)).astype(dtype))


def test_contraction_is_a_setting_and_a_pragma():
    rng = np.random.default_rng(3)
    a, b, c = rng.normal(size=(3, 32)).astype(np.float32)
    arrays = [mx.array(v) for v in (a, b, c)]
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    apart = a * b + c
    assert (fused != apart).any()
    source = "o[i] = x[i] * y[i] + z[i];"
    np.testing.assert_array_equal(np.asarray(run(source, *arrays, contract="on")), fused)
    np.testing.assert_array_equal(np.asarray(run(source, *arrays, contract="off")), apart)
    block = "{\n#pragma METAL fp contract(off)\n" + source + "\n}"
    np.testing.assert_array_equal(np.asarray(run(block, *arrays, contract="on")), apart)


def test_buffers_are_aligned_for_the_widest_load(mode):
    x = mx.arange(33, dtype=mx.uint32)[1:]
    got = run("if (i < 8) *(device uint4*)(o + 4 * i) = *(const device uint4*)(x + 4 * i);", x, dtype=mx.uint32)
    assert mx.array_equal(got, x)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    order=st.permutations([0, 1, 2]),
    steps=st.tuples(*[st.sampled_from([1, -1, 2])] * 3),
    broadcast=st.booleans(),
)
def test_strides_reach_every_element(shape, order, steps, broadcast):
    x = mx.arange(int(np.prod(shape)), dtype=mx.int32).reshape(shape)
    x = x[tuple(slice(None, None, step) for step in steps)].transpose(order)
    x = mx.broadcast_to(x[:1], (3, *x.shape[1:])) if broadcast else x
    kernel = metal_kernel(
        "strided", ["x"], ["o"],
        "uint3 p = thread_position_in_grid;\n"
        "long at = p.z * x_strides[0] + p.y * x_strides[1] + p.x * x_strides[2];\n"
        "o[(p.z * x_shape[1] + p.y) * x_shape[2] + p.x] = x[at];",
        ensure_row_contiguous=False,
    )  # fmt: skip
    got = kernel(
        inputs=[x],
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=x.shape[::-1],
        threadgroup=(4, 4, 4),
        mode="check",
    )[0]
    assert mx.array_equal(got, x)


def test_scalars_are_references():
    kernel = metal_kernel(
        "scalar", ["x", "s"], ["o"], "o[thread_position_in_grid.x] = x[thread_position_in_grid.x] * s;"
    )
    got = kernel(
        inputs=[mx.arange(8.0), 3.0],
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
    )
    assert got[0].tolist() == [3.0 * k for k in range(8)]


@pytest.mark.parametrize("count", [5, 6, 7, 9, 10, 13])
def test_loops_of_any_number_of_turns_see_all_numbers(mode, count):
    """Some compilers' vectors leave the last of so many out."""
    x = np.random.default_rng(count).standard_normal((32, count)).astype(np.float32)
    source = """
    float own[N], highest = -INFINITY;
    for (int k = 0; k < N; k++) own[k] = x[i * N + k];
    for (int k = 0; k < N; k++) highest = metal::max(highest, own[k]);
    o[i] = highest;
    """
    np.testing.assert_array_equal(run(source, mx.array(x), template=[("N", count)]), x.max(axis=1))
