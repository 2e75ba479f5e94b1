"""What the README promises kernels may use means the same on every backend: compared with NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv_kernels.testing import legs


@pytest.fixture(params=legs(), ids=str)
def run(request, write_kernel):
    """Runs a text with `inputs` {name: array}, and returns its only output `out` as NumPy."""

    def launch(text, inputs, shape, dtype=mx.float32, grid=(32, 1, 1), threadgroup=(32, 1, 1), **template):
        made = write_kernel("language", text, inputs, ["out"], template=tuple(template))
        out = made(
            inputs=[mx.array(x) for x in inputs.values()],
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[shape],
            output_dtypes=[dtype],
            backend=request.param.backend,
        )[0]
        return np.array(out)

    with request.param.active():
        yield launch


MATRIX_LANES = "using unused = simdgroup_float8x8;\n"  # a kernel with matrices has its lanes renumbered on CUDA


@pytest.mark.parametrize("helpers", ["", MATRIX_LANES], ids=["plain", "matrix lanes"])
def test_positions(run, helpers):
    text = (
        helpers
        + """// --- body ---
    const uint3 p = thread_position_in_grid, n = threads_per_grid;
    const uint i = p.x + n.x * (p.y + n.y * p.z);
    const uint3 own = thread_position_in_threadgroup, size = threads_per_threadgroup;
    const uint3 group = threadgroup_position_in_grid, groups = threadgroups_per_grid;
    device int* to = out + 12 * i;
    to[0] = own.x; to[1] = own.y; to[2] = own.z;
    to[3] = group.x; to[4] = group.y; to[5] = group.z;
    to[6] = size.x * 100 + size.y * 10 + size.z;
    to[7] = groups.x * 100 + groups.y * 10 + groups.z;
    to[8] = thread_index_in_threadgroup;
    to[9] = simdgroup_index_in_threadgroup;
    to[10] = thread_index_in_simdgroup;
    to[11] = simdgroups_per_threadgroup * 100 + threads_per_simdgroup + x[0];
"""
    )
    size, groups = np.array([8, 4, 2]), np.array([2, 3, 2])
    grid = size * groups
    got = run(text, {"x": np.zeros(8, np.int32)}, (*grid[::-1], 12), mx.int32, tuple(grid.tolist()), (8, 4, 2))
    z, y, x = np.indices(grid[::-1])
    own = [x % 8, y % 4, z % 2]
    index = own[0] + 8 * (own[1] + 4 * own[2])
    rest = [x // 8, y // 4, z // 2, 842 + 0 * x, 232 + 0 * x, index, index // 32, index % 32, 232 + 0 * x]
    np.testing.assert_array_equal(got, np.stack(own + rest, axis=-1))


SIMD = {
    "simd_sum(v)": lambda v: np.full(32, v.sum()),
    "simd_max(v)": lambda v: np.full(32, v.max()),
    "simd_min(v)": lambda v: np.full(32, v.min()),
    "int(simd_max(uint(v) ^ 0x80000000u) ^ 0x80000000u)": lambda v: np.full(32, v.max()),
    "simd_or(v)": lambda v: np.full(32, np.bitwise_or.reduce(v)),
    "simd_and(v)": lambda v: np.full(32, np.bitwise_and.reduce(v)),
    "simd_xor(v)": lambda v: np.full(32, np.bitwise_xor.reduce(v)),
    "simd_prefix_inclusive_sum(v)": np.cumsum,
    "simd_prefix_exclusive_sum(v)": lambda v: np.cumsum(v) - v,
    "simd_shuffle(v, ushort((lane * 5 + 3) % 32))": lambda v: v[(np.arange(32) * 5 + 3) % 32],
    "simd_shuffle_xor(v, 13)": lambda v: v[np.arange(32) ^ 13],
    "simd_broadcast(v, 7)": lambda v: np.full(32, v[7]),
    "simd_broadcast_first(v)": lambda v: np.full(32, v[0]),
    "int(simd_any(lane == 9))": lambda v: np.full(32, 1),
    "int(simd_all(lane != 9))": lambda v: np.full(32, 0),
    "quad_sum(v)": lambda v: np.repeat(v.reshape(8, 4).sum(1), 4),
    "quad_max(v)": lambda v: np.repeat(v.reshape(8, 4).max(1), 4),
    "quad_shuffle_xor(v, 2)": lambda v: v[np.arange(32) ^ 2],
}


@pytest.mark.parametrize("helpers", ["", MATRIX_LANES], ids=["plain", "matrix lanes"])
def test_simd_functions(run, helpers):
    lines = [f"    out[{i} * 32 + lane] = {expression};" for i, expression in enumerate(SIMD)]
    shifts = "    const int up = simd_shuffle_up(v, 6), down = simd_shuffle_down(v, 6);\n"
    shifts += f"    out[{len(SIMD)} * 32 + lane] = (lane < 6 ? 0 : up) + (lane > 25 ? 0 : down);\n"
    text = "// --- body ---\n    const uint lane = thread_index_in_simdgroup;\n    const int v = x[lane];\n"
    v = np.random.default_rng(0).integers(0, 1000, 32).astype(np.int32)
    got = run(helpers + text + "\n".join(lines) + "\n" + shifts, {"x": v}, (len(SIMD) + 1, 32), mx.int32)
    for row, (expression, expected) in zip(got, SIMD.items(), strict=False):
        np.testing.assert_array_equal(row, expected(v), err_msg=expression)
    up, down = np.r_[np.zeros(6, int), v[:-6]], np.r_[v[6:], np.zeros(6, int)]
    np.testing.assert_array_equal(got[-1], up + down)


# In units in the last place of float32; exact functions have 0. exp, log, sin and their kin differ between libraries.
MATHEMATICS = {
    "metal::exp(a)": (np.exp, 8),
    "metal::exp2(a)": (np.exp2, 8),
    "metal::precise::exp2(a)": (np.exp2, 8),
    "metal::log(metal::abs(a))": (lambda a: np.log(np.abs(a)), 8),
    "metal::log2(metal::abs(a))": (lambda a: np.log2(np.abs(a)), 8),
    "metal::sqrt(metal::abs(a))": (lambda a: np.sqrt(np.abs(a)), 1),
    "metal::rsqrt(metal::abs(a))": (lambda a: 1 / np.sqrt(np.abs(a)), 4),
    "metal::rint(a * 2.0f)": (lambda a: np.rint(a * 2), 0),
    "metal::floor(a)": (np.floor, 0),
    "metal::ceil(a)": (np.ceil, 0),
    "metal::trunc(a)": (np.trunc, 0),
    "metal::max(a, 0.5f)": (lambda a: np.maximum(a, 0.5), 0),
    "metal::min(a, NAN)": (lambda a: a, 0),
    "metal::max(NAN, a)": (lambda a: a, 0),
    "metal::clamp(a, -1.0f, 1.0f)": (lambda a: np.clip(a, -1, 1), 0),
    "metal::select(a, 7.0f, a > 0.0f)": (lambda a: np.where(a > 0, 7, a), 0),
    "metal::fma(a, a, 1.0f)": (lambda a: a.astype(np.float64) ** 2 + 1, 0),
    "float(metal::isnan(a / INFINITY * INFINITY))": (lambda a: np.ones_like(a), 0),
    "float(metal::isinf(a * INFINITY))": (lambda a: np.ones_like(a), 0),
    "float(metal::max(int(a), 1) + metal::min(3, -2) + metal::abs(-4))": (lambda a: np.maximum(np.trunc(a), 1) + 2, 0),
    "float(popcount(as_type<uint>(a)))": (lambda a: [f"{i:b}".count("1") for i in a.view(np.uint32)], 0),
    "float(clz(uint(metal::abs(a))))": (lambda a: [32 - int(abs(i)).bit_length() for i in a], 0),
    "float(ctz(uint(int(a) | 64)))": (
        lambda a: [int(i & -i).bit_length() - 1 for i in np.trunc(a).astype(int) | 64],
        0,
    ),
    "float(upper_bytes(as_type<uint>(a)))": (lambda a: a.view(np.uint32) >> 8 & 0xFF00FF, 0),
    "float(half(a)) + float(bfloat(2.5f)) + float(half(1.5f))": (lambda a: np.float32(a.astype(np.float16)) + 4, 0),
    "float(as_type<half>(as_type<ushort>(half(a))))": (lambda a: a.astype(np.float16), 0),
}


def test_mathematics(run):
    a = np.array([0.3, -0.75, 1.25, -2.25, 5.5, -7.5, 30.0, -31.9], np.float32)
    body = "\n".join(f"    out[{i} * 32 + lane] = {expression};" for i, expression in enumerate(MATHEMATICS))
    text = (
        "// --- body ---\n    const uint lane = thread_position_in_grid.x;\n    const float a = x[lane % 8];\n" + body
    )
    got = run(text + "\n", {"x": a}, (len(MATHEMATICS), 32))
    with np.errstate(all="ignore"):
        for row, (expression, (function, ulp)) in zip(got, MATHEMATICS.items(), strict=True):
            exact = a.astype(np.float64) if ulp else a
            expected = np.asarray(function(exact)).astype(np.float32)
            off = np.abs(row[:8] - expected) / np.spacing(np.abs(expected))
            assert (off <= ulp).all(), f"{expression}: off by {off} units in the last place"


def test_vectors_and_reinterpretation(run):
    text = """// --- body ---
    const uint i = thread_position_in_grid.x;
    const uint4 words = *reinterpret_cast<const device uint4*>(x + 4 * (i % 4));
    const uint4 mixed = ((words >> 3u) ^ (words << 1u)) & uint4{255u, 255u, 65535u, 65535u};
    float4 sum = {float(mixed.x), float(mixed.y), float(mixed.z), float(mixed.w)};
    sum = sum * 2.0f + float4{1, 2, 3, 4};
    const half2 pair = as_type<half2>(words.x & 0x3fff3fffu) + as_type<half2>(pack_half2(0.5f, 0.25f));
    out[i] = sum.x + sum.y + sum.z + sum.w + float(pair.x) + float(pair.y);
"""
    x = np.random.default_rng(0).integers(0, 2**32, 16, dtype=np.uint32)
    words = np.tile(x.reshape(4, 4), (8, 1))
    mixed = ((words >> 3) ^ (words << 1)) & np.array([255, 255, 65535, 65535], np.uint32)
    pair = (words[:, :1] & 0x3FFF3FFF).view(np.float16) + np.array([0.5, 0.25], np.float16)
    expected = (mixed * 2.0 + [1, 2, 3, 4]).sum(1) + pair.astype(np.float64).sum(1)
    np.testing.assert_allclose(run(text, {"x": x}, (32,)), expected, rtol=1e-6)  # the order of the sum


def test_precise_arithmetic_is_never_fused(run):
    text = """// --- body ---
    const uint i = thread_position_in_grid.x;
    out[i] = precise_add(precise_mul(a[i], b[i]), c[i]);
    out[32 + i] = precise_sub(c[i], precise_mul(a[i], b[i]));
"""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 32)).astype(np.float32)
    c = -(a * b)  # what is left of a fused product is its rounding error, unfused it is zero
    got = run(text, {"a": a, "b": b, "c": c}, (2, 32))
    np.testing.assert_array_equal(got, np.stack([a * b + c, c - a * b]))


def test_threadgroup_atomics(run):
    text = """// --- body ---
    threadgroup atomic_uint sum, low, high, bits;
    threadgroup atomic_int difference;
    const uint i = thread_position_in_grid.x;
    if (i == 0) {
        atomic_store_explicit(&sum, 0u, memory_order_relaxed);
        atomic_store_explicit(&low, 999u, memory_order_relaxed);
        atomic_store_explicit(&high, 0u, memory_order_relaxed);
        atomic_store_explicit(&bits, 0u, memory_order_relaxed);
        atomic_store_explicit(&difference, 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&sum, x[i], memory_order_relaxed);
    atomic_fetch_min_explicit(&low, x[i], memory_order_relaxed);
    atomic_fetch_max_explicit(&high, x[i], memory_order_relaxed);
    atomic_fetch_or_explicit(&bits, x[i], memory_order_relaxed);
    atomic_fetch_sub_explicit(&difference, int(x[i]), memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 0) {
        out[0] = int(atomic_load_explicit(&sum, memory_order_relaxed));
        out[1] = int(atomic_load_explicit(&low, memory_order_relaxed));
        out[2] = int(atomic_load_explicit(&high, memory_order_relaxed));
        out[3] = int(atomic_load_explicit(&bits, memory_order_relaxed));
        out[4] = atomic_load_explicit(&difference, memory_order_relaxed);
    }
"""
    x = np.random.default_rng(0).integers(3, 999, 128).astype(np.uint32)
    got = run(text, {"x": x}, (5,), mx.int32, (128, 1, 1), (128, 1, 1))
    assert got.tolist() == [x.sum(), x.min(), x.max(), np.bitwise_or.reduce(x), -int(x.sum())]


FRAGMENT = """
template <typename T, typename P> METAL_FUNC simdgroup_matrix<T, 8, 8> load(P from, uint stride, uint lane) {
    const uint row = ((lane / 4) & 4) + (lane / 2) % 4, column = 2 * (((lane / 4) & 2) + lane % 2);
    simdgroup_matrix<T, 8, 8> m;
    m.thread_elements().x = T(from[row * stride + column]);
    m.thread_elements().y = T(from[row * stride + column + 1]);
    return m;
}
template <typename T, typename P> METAL_FUNC simdgroup_matrix<T, 8, 8> load_right(P from, uint stride, uint lane) {
    const uint row = ((lane / 4) & 4) + (lane / 2) % 4, column = 2 * (((lane / 4) & 2) + lane % 2);
    if (!reads_right_by_columns<T>()) return load<T>(from, stride, lane);
    simdgroup_matrix<T, 8, 8> m;
    m.thread_elements().x = T(from[column * stride + row]);
    m.thread_elements().y = T(from[(column + 1) * stride + row]);
    return m;
}
template <typename P> METAL_FUNC void store(simdgroup_float8x8 m, P to, uint lane) {
    const uint row = ((lane / 4) & 4) + (lane / 2) % 4, column = 2 * (((lane / 4) & 2) + lane % 2);
    to[row * 8 + column] = m.thread_elements().x;
    to[row * 8 + column + 1] = m.thread_elements().y;
}
"""


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_matrices(run, dtype):
    text = (
        FRAGMENT
        + """// --- body ---
    const uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 c0 = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), c1 = c0, d = c0, e0 = c0, e1 = c0;
    multiply_accumulate_16x8x16(c0, c1, load<T>(a, 16, lane), load<T>(a + 8, 16, lane), load<T>(a + 128, 16, lane),
                                load<T>(a + 136, 16, lane), load<T>(b, 8, lane), load<T>(b + 64, 8, lane));
    multiply_accumulate_16x8x16_as_read(e0, e1, load<T>(a, 16, lane), load<T>(a + 8, 16, lane),
                                        load<T>(a + 128, 16, lane), load<T>(a + 136, 16, lane),
                                        load_right<T>(b, 8, lane), load_right<T>(b + 64, 8, lane));
    simdgroup_multiply_accumulate(d, load<T>(a, 16, lane), load<T>(b, 8, lane), d);
    store(c0, out, lane);
    store(c1, out + 64, lane);
    store(e0, out + 128, lane);
    store(e1, out + 192, lane);
    store(d, out + 256, lane);
"""
    )
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)).astype(np.float32), rng.integers(-8, 9, (16, 8)).astype(np.float32)
    got = run(text, {"a": a, "b": b}, (40, 8), T=dtype)
    np.testing.assert_array_equal(
        got, np.concatenate([a @ b + 1, a @ b + 1, a[:8, :8] @ b[:8] + 1])
    )  # small integers: exact
