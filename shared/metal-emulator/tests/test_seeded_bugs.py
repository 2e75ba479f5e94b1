"""Every kernel here has one bug. The emulator must name its kind and its line, in both thread orders."""

from dataclasses import dataclass
from textwrap import dedent

import mlx.core as mx
import pytest

from mlx_kv_emulator import CompileError, EmulatorError, metal_kernel

HEAD = """uint i = thread_position_in_grid.x;
uint l = thread_index_in_simdgroup;
uint sg = simdgroup_index_in_threadgroup; (void)l; (void)sg;
#line 1 "seeded.metal"
"""


def run(body, *, n=64, group=64, mode="check", order=0, header=""):
    kernel = metal_kernel("seeded", ["x"], ["o"], HEAD + dedent(body).strip(), header=header, mode=mode, order=order)
    return kernel(
        inputs=[mx.arange(n, dtype=mx.float32)],
        output_shapes=[(n,)],
        output_dtypes=[mx.float32],
        grid=(n, 1, 1),
        threadgroup=(group, 1, 1),
    )[0]


@dataclass
class Bug:
    """`lines` are those that a report may name: a race has two."""

    kind: str
    lines: set[int | None]
    body: str
    n: int = 64
    group: int = 64


BUGS = {
    "read past the end": Bug("bounds", {1}, "o[i] = x[i+1];"),
    "write past the end": Bug(
        "bounds",
        {2},
        """
        float v = x[i];
        o[i+1] = v;
        """,
    ),
    "write far away": Bug("bounds", {1}, "o[i*100000000] = x[i];"),
    "write to an input": Bug(
        "read-only",
        {1},
        """
        ((device float*)x)[i] = 1;
        o[i] = x[i];
        """,
    ),
    "no barrier": Bug(
        "race",
        {2, 3},
        """
        threadgroup float b[64];
        b[i] = x[i];
        o[i] = b[63-i];
        """,
    ),
    "no second barrier": Bug(
        "race",
        {3, 5},
        """
        threadgroup float b[64]; float s = 0;
        for (int it = 0; it < 2; it++) {
        b[i] = x[i] + it;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s += b[63-i];
        }
        o[i] = s;
        """,
    ),
    "barrier for other memory": Bug(
        "race",
        {4},
        """
        threadgroup float b[64];
        b[i] = x[i];
        threadgroup_barrier(mem_flags::mem_device);
        o[i] = b[63-i];
        """,
    ),
    "all write one element": Bug(
        "race",
        {1},
        """
        o[0] = x[i];
        o[i] = x[i];
        """,
    ),
    "threadgroups overlap": Bug(
        "race",
        {1, 2},
        """
        o[i % 32] = x[i];
        if (i >= 32) o[i] = 0;
        """,
        group=32,
    ),
    "lanes taken to be in step": Bug(
        "race",
        {2, 3},
        """
        threadgroup float b[32];
        b[l] = x[i];
        o[i] = b[31-l];
        """,
        n=32,
        group=32,
    ),
    "threadgroup memory never set": Bug(
        "uninitialised",
        {4},
        """
        threadgroup float b[64];
        if (l == 0) b[i] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = b[i];
        """,
    ),
    "output read before it is written": Bug("uninitialised", {1}, "o[i] += x[i];"),
    "barrier in a branch": Bug(
        "divergence",
        {2},
        """
        if (i < 40)
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = 1;
        """,
    ),
    "two barriers in two branches": Bug(
        "divergence",
        {2, 4},
        """
        if (i < 32)
        threadgroup_barrier(mem_flags::mem_threadgroup);
        else
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = 1;
        """,
    ),
    "return before a barrier": Bug(
        "divergence",
        {2},
        """
        if (i >= 60) return;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = 1;
        """,
    ),
    "simd_sum in a branch": Bug(
        "divergence",
        {2},
        """
        float s = 0; if (l < 16)
        s = simd_sum(x[i]);
        s += simd_max(s);
        o[i] = s;
        """,
    ),
    "shuffle in a loop of uneven length": Bug(
        "inactive-lane",
        {3},
        """
        float s = x[i];
        for (uint j = 0; j < l % 3 + 1; j++)
        s += simd_shuffle_xor(s, 1);
        o[i] = s;
        """,
    ),
    "index past a local array": Bug(
        "bounds",
        {2},
        """
        float v[4];
        for (int j = 0; j <= int(x[0]) + 4; j++) v[j] = j;
        o[i] = v[3];
        """,
    ),
    "shift by 32": Bug(
        "shift",
        {2},
        """
        uint s = uint(x[0]) + 32;
        o[i] = float(1u << s);
        """,
    ),
    "integer division by zero": Bug(
        "division",
        {2},
        """
        int d = int(x[0]);
        o[i] = float(int(i) / d);
        """,
    ),
    "negative float to uint8": Bug(
        "conversion",
        {2},
        """
        float v = x[i] - 3.0f;
        o[i] = float(uint8_t(v));
        """,
    ),
    "part of the output": Bug("unwritten", {None}, "if (i < 10) o[i] = 1;"),
    "misaligned vector": Bug(
        "misaligned",
        {1},
        """
        float4 v = *(const device float4*)(x + 1);
        o[i] = v.x;
        """,
    ),
    "too much threadgroup memory": Bug(
        "threadgroup-memory",
        {None},
        """
        threadgroup float b[8200];
        b[i] = x[i]; o[i] = b[i];
        """,
    ),
    "past a threadgroup array into the next": Bug(
        "bounds",
        {3},
        """
        threadgroup float a[64]; threadgroup float b[64];
        b[i] = x[i]; device float* out = o;
        threadgroup float* p = a; p[i + 1] = x[i];
        out[i] = b[i];
        """,
    ),
    "wide load past the end": Bug(
        "bounds", {1}, "ulong4 v = *(const device ulong4*)(x + (i / 8) * 8 + 8); o[i] = v.x;"
    ),
}


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_caught(bug, order):
    seeded = BUGS[bug]
    with pytest.raises(EmulatorError) as caught:
        run(seeded.body, n=seeded.n, group=seeded.group, order=order)
    matching = [finding for finding in caught.value.findings if finding.kind == seeded.kind]
    assert matching, f"expected {seeded.kind}, got:\n{caught.value}"
    assert matching[0].line in seeded.lines, str(caught.value)
    if matching[0].place:
        assert f"seeded.metal:{matching[0].line}" in str(caught.value)


SOUND = {
    "copy": ("o[i] = x[i];", 64, 64),
    "simdgroup barrier": (
        "threadgroup float b[32];\nb[l] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = b[31-l];",
        32,
        32,
    ),
    "threadgroup barrier": (
        "threadgroup float b[64];\nb[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = b[63-i];",
        64,
        64,
    ),
    "branch by simdgroup": ("float s = 0; if (sg == 0) s = simd_sum(x[i]); o[i] = s;", 64, 64),
    "ragged threadgroup": ("o[i] = simd_sum(x[i]);", 50, 32),
}


@pytest.mark.parametrize("mode", ["run", "check", "strict"])
@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel_passes(name, mode):
    body, n, group = SOUND[name]
    assert run(body, n=n, group=group, mode=mode).shape == (n,)


def test_helper_is_named_with_its_caller():
    header = "inline float f(threadgroup float* b, float v, uint i) {\nb[i] = v;\nreturn b[i ^ 33];\n}\n"
    with pytest.raises(EmulatorError) as caught:
        run("threadgroup float b[64];\no[i] = f(b, x[i], i);", header=header)
    race = next(finding for finding in caught.value.findings if finding.kind == "race")
    assert (race.place.file, race.place.line) in {("seeded.header.metal", 2), ("seeded.header.metal", 3)}
    assert (race.place.caller.file, race.place.caller.line) == ("seeded.metal", 2)
    assert len(race.accesses) == 2


def test_local_variable_never_set_is_nan():
    values = run("float v; if (x[i] > 100) v = 1;\no[i] = v;", mode="run")
    assert mx.isnan(values).all().item()


F = "inline float f(const device float* p) { return p[0]; }\n"
ILL_TYPED = {
    "device pointer as a thread pointer": ("const float* p = x + i; o[i] = *p;", "", 64),
    "threadgroup array as a device pointer": ("threadgroup float b[64]; device float* p = b; o[i] = *p;", "", 64),
    "small input is in constant": ("o[i] = f(x);", F, 4),
    "thread array as a device pointer": ("float v[4]; o[i] = f(v);", F, 64),
    "assignment to an input": ("x[i] = 1; o[i] = 0;", "", 64),
    "max of uint and int": ("o[i] = max(i, 3);", "", 64),
    "half as bfloat": ("bfloat b = 1.0h; o[i] = b;", "", 64),
    "undeclared position": ("uint k = thread_pos.x; o[i] = k;", "", 64),
    "as_type of another size": ("o[i] = as_type<half>(x[i]);", "", 64),
}


@pytest.mark.parametrize("name", ILL_TYPED)
def test_strict_mode_refuses(name):
    body, header, n = ILL_TYPED[name]
    with pytest.raises(CompileError, match=r"seeded\.metal:1:"):
        run(body, n=n, group=n, mode="strict", header=header)


WELL_TYPED = {
    "device pointer": ("const device float* p = x + i; o[i] = *p;", "", 64),
    "large input is in device": ("o[i] = f(x);", F, 64),
    "literal without suffix": ("o[i] = max(x[i], 0.5) * 2.0;", "", 64),
    "threadgroup atomic": (
        "threadgroup atomic_uint n; atomic_store_explicit(&n, 7u, memory_order_relaxed);"
        " o[i] = atomic_load_explicit(&n, memory_order_relaxed);",
        "",
        64,
    ),
    "bfloat from float": ("bfloat b = x[i]; o[i] = b;", "", 64),
    "swizzles": ("float4 v = float4(x[i]); v.xy = v.wz; o[i] = v.x + v.zyx.y;", "", 64),
}


@pytest.mark.parametrize("name", WELL_TYPED)
def test_strict_mode_accepts(name):
    body, header, n = WELL_TYPED[name]
    run(body, n=n, group=n, mode="strict", header=header)
