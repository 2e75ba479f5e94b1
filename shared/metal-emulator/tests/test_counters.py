import mlx.core as mx

from mlx_kv_emulator import counters, last_launch, metal_kernel


def run(source, n=64, group=32, mode="check", **other):
    kernel = metal_kernel("counted", ["x"], ["o"], source, **other)
    arguments = dict(inputs=[mx.arange(n, dtype=mx.float32)], output_shapes=[(n,)], output_dtypes=[mx.float32])
    return kernel(**arguments, grid=(n, 1, 1), threadgroup=(group, 1, 1), mode=mode)[0]


def test_a_copy_reads_and_writes_every_byte_once():
    run("o[thread_position_in_grid.x] = x[thread_position_in_grid.x];")
    launch = last_launch()
    x, o = launch.buffers["x"], launch.buffers["o"]
    assert (x.nbytes, x.bytes_read, x.distinct_bytes_read, x.bytes_written) == (256, 256, 256, 0)
    assert (o.bytes_written, o.distinct_bytes_written, o.bytes_read) == (256, 256, 0)
    assert (launch.bytes_read, launch.bytes_written) == (256, 256)


def test_a_byte_read_twice_counts_twice_but_is_one_byte():
    run("uint i = thread_position_in_grid.x;\no[i] = x[i] + x[(i + 1) % 64] + x[i % 2];")
    x = last_launch().buffers["x"]
    assert (x.bytes_read, x.distinct_bytes_read) == (3 * 256, 256)


def test_part_of_an_input():
    run("o[thread_position_in_grid.x] = x[thread_position_in_grid.x / 2];")
    x = last_launch().buffers["x"]
    assert (x.bytes_read, x.distinct_bytes_read) == (256, 128)


def test_vectors_and_shapes():
    run(
        "uint i = thread_position_in_grid.x;\n"
        "if (i < 16) *(device float4*)(o + 4 * i) = *(const device float4*)(x + 4 * i) * x_shape[0];"
    )
    buffers = last_launch().buffers
    assert (buffers["x"].bytes_read, buffers["o"].bytes_written) == (256, 256)
    assert (buffers["x_shape"].bytes_read, buffers["x_shape"].distinct_bytes_read) == (16 * 4, 4)


def test_an_atomic_update_is_a_read_and_a_write():
    kernel = metal_kernel(
        "atomic", ["x"], ["o"], "atomic_fetch_add_explicit(o, 1u, memory_order_relaxed);", atomic_outputs=True
    )
    run = dict(inputs=[mx.zeros(8)], output_shapes=[(1,)], output_dtypes=[mx.uint32], init_value=0)
    kernel(**run, grid=(10, 1, 1), threadgroup=(10, 1, 1), mode="check")
    o = last_launch().buffers["o"]
    assert (o.bytes_read, o.bytes_written, o.distinct_bytes_written) == (40, 40, 4)


SYNCHRONISED = """
threadgroup float partial[2];
uint i = thread_position_in_grid.x;
float s = simd_sum(x[i]);
s += simd_shuffle_xor(s, 1);
simdgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
o[i] = partial[0] + partial[1];
"""


def test_synchronisation_is_counted_per_group_in_every_mode():
    for mode in ("run", "check", "strict"):
        run(SYNCHRONISED, n=192, group=64, mode=mode)  # 3 threadgroups of 2 simdgroups
        launch = last_launch()
        assert (launch.threadgroups, launch.barriers) == (3, 3)
        assert (launch.simdgroup_barriers, launch.simd_operations) == (6, 12)
        assert launch.threadgroup_memory == 8
        assert bool(launch.buffers) == (mode == "check")


def test_counters_collect_in_order_and_nest():
    with counters() as outer:
        run("o[thread_position_in_grid.x] = 1;", mode="run")
        with counters() as inner:
            run("o[thread_position_in_grid.x] = 2;", mode="run")
    run("o[thread_position_in_grid.x] = 3;", mode="run")
    assert [launch.kernel for launch in outer] == ["counted"] * 2
    assert inner == outer[1:]
