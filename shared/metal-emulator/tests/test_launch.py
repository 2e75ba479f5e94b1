"""MLX's launch rule and the attributes of a thread, against plain Python."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv_emulator import CompileError, EmulatorError, last_launch, metal_kernel

ATTRIBUTES = {
    "thread_position_in_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threads_per_threadgroup": 3,
    "dispatch_threads_per_threadgroup": 3,
    "threads_per_grid": 3,
    "grid_size": 3,
    "grid_origin": 3,
    "threadgroups_per_grid": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "thread_index_in_quadgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "quadgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "dispatch_simdgroups_per_threadgroup": 1,
    "quadgroups_per_threadgroup": 1,
    "dispatch_quadgroups_per_threadgroup": 1,
    "threads_per_simdgroup": 1,
    "thread_execution_width": 1,
}
WIDTH = sum(ATTRIBUTES.values())


def dump_source():
    lines = [
        "uint3 at = thread_position_in_grid, all = threads_per_grid;",
        "device uint* p = o + ((at.z * all.y + at.y) * all.x + at.x) * WIDTH;",
    ]
    for name, size in ATTRIBUTES.items():
        lines += [
            f"*p++ = {name}{axis};"
            for axis in ("xyz" if size == 3 else [""])
            for axis in ([f".{axis}"] if axis else [""])
        ]
    return "\n".join(lines)


dump = metal_kernel("dump", ["x"], ["o"], dump_source())
sizes = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))


def expected(grid, threadgroup):
    """What every thread of a grid must see, from the rule alone."""
    size = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    dispatched = int(np.prod(size))
    rows = {}
    for at in itertools.product(*(range(n) for n in grid)):
        group = [a // s for a, s in zip(at, size, strict=True)]
        inside = [a % s for a, s in zip(at, size, strict=True)]
        extent = [min(s, g - k * s) for s, g, k in zip(size, grid, group, strict=True)]
        index = inside[0] + extent[0] * (inside[1] + extent[1] * inside[2])
        threads = int(np.prod(extent))
        counts = [-(-g // s) for g, s in zip(grid, size, strict=True)]
        row = [*at, *inside, *group, *extent, *size, *grid, *grid, 0, 0, 0, *counts]
        row += [index, index % 32, index % 4, index // 32, index // 4]
        row += [-(-threads // 32), -(-dispatched // 32), -(-threads // 4), -(-dispatched // 4), 32, 32]
        rows[at] = row
    return np.array([rows[x, y, z] for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])])


@settings(deadline=None, max_examples=40)
@given(
    grid=sizes, threadgroup=st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5)), order=st.integers(0, 1)
)
def test_attributes_of_every_thread(grid, threadgroup, order):
    threads = int(np.prod(grid))
    (o,) = dump(
        inputs=[mx.zeros(8)],
        template=[("WIDTH", WIDTH)],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(threads, WIDTH)],
        output_dtypes=[mx.uint32],
        order=order,
    )
    np.testing.assert_array_equal(np.asarray(o), expected(grid, threadgroup))
    assert last_launch().threadgroup == tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))


copy = metal_kernel("copy", ["x"], ["o"], "o[thread_position_in_grid.x] = x[thread_position_in_grid.x];")


def call(kernel, n=4, **other):
    arguments = dict(
        inputs=[mx.arange(n, dtype=mx.float32)],
        grid=(n, 1, 1),
        threadgroup=(n, 1, 1),
        output_shapes=[(n,)],
        output_dtypes=[mx.float32],
    )
    return kernel(**{**arguments, **other})[0]


def test_empty_grid_runs_nothing():
    assert call(copy, 0, threadgroup=(32, 1, 1)).size == 0
    assert last_launch().threadgroups == 0


def test_empty_grid_leaves_outputs_unwritten():
    with pytest.raises(EmulatorError) as caught:
        call(copy, grid=(0, 1, 1))
    assert caught.value.findings[0].kind == "unwritten"


def test_too_many_threads_are_refused():
    with pytest.raises(ValueError, match=r"at most 1024 threads in a threadgroup, got 1025"):
        call(copy, 1025)
    assert call(copy, 1024, threadgroup=(2048, 1, 1)).size == 1024


@pytest.mark.parametrize("wrong", [dict(inputs=[]), dict(output_shapes=[]), dict(output_dtypes=[]), dict(grid=(4, 1))])
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"\[metal_kernel\] expected"):
        call(copy, **wrong)


def test_order_is_the_order_of_threads():
    first = metal_kernel(
        "first", ["x"], ["o"], "if (atomic_fetch_add_explicit(o, 1u, memory_order_relaxed) == 0)\n"
        "atomic_store_explicit(o + 1, thread_position_in_grid.x, memory_order_relaxed);", atomic_outputs=True,
    )  # fmt: skip
    run = dict(inputs=[mx.zeros(8)], grid=(96, 1, 1), threadgroup=(48, 1, 1), output_shapes=[(2,)], init_value=0)
    assert first(**run, output_dtypes=[mx.uint32], order=0)[0].tolist() == [96, 0]
    assert first(**run, output_dtypes=[mx.uint32], order=1)[0].tolist() == [96, 95]


def test_line_directives_are_honoured():
    with pytest.raises(CompileError, match=r"pack\.metal:41:"):
        call(metal_kernel("k", ["x"], ["o"], '#line 40 "pack.metal"\nuint i = 0;\no[i] = y[i];'))
    with pytest.raises(CompileError, match=r"helpers\.metal:8:"):
        call(metal_kernel("k", ["x"], ["o"], "o[0] = 1;", header='#line 7 "helpers.metal"\n\nfloat f() { return y; }'))
    with pytest.raises(EmulatorError, match=r"pack\.metal:40: bounds"):
        call(
            metal_kernel("k", ["x"], ["o"], '#line 40 "pack.metal"\no[thread_position_in_grid.x + 1] = 1;'),
            mode="check",
        )
