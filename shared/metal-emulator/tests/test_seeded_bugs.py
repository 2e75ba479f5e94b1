"""Every kernel here has one bug. The emulator must name its kind and its line, in both thread orders."""

import mlx.core as mx
import pytest

from mlx_kv_emulator import CompileError, EmulatorError, metal_kernel

HEAD = """uint i = thread_position_in_grid.x;
uint l = thread_index_in_simdgroup;
uint sg = simdgroup_index_in_threadgroup; (void)l; (void)sg;
"""


def run(body, *, n=64, group=64, mode="check", order=0, header="", name="seeded", x=None, allow=()):
    kernel = metal_kernel(name, ["x"], ["o"], HEAD + body, header=header, mode=mode, order=order, allow=allow)
    x = mx.arange(n, dtype=mx.float32) if x is None else x
    return kernel(inputs=[x], output_shapes=[(n,)], output_dtypes=[mx.float32], grid=(n, 1, 1), threadgroup=(group, 1, 1))[0]


# name: (kind, lines that may be named, body, threads, threads of a threadgroup). The body begins on line 4.
BUGS = {
    "read past the end": ("bounds", {4}, "o[i] = x[i+1];", 64, 64),
    "write past the end": ("bounds", {5}, "float v = x[i];\no[i+1] = v;", 64, 64),
    "write far away": ("bounds", {4}, "o[i*100000000] = x[i];", 64, 64),
    "write to an input": ("read-only", {4}, "((device float*)x)[i] = 1;\no[i] = x[i];", 64, 64),
    "no barrier": ("race", {5, 6}, "threadgroup float b[64];\nb[i] = x[i];\no[i] = b[63-i];", 64, 64),
    "no second barrier": (
        "race",
        {6, 8},
        "threadgroup float b[64]; float s = 0;\nfor (int it = 0; it < 2; it++) {\nb[i] = x[i] + it;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ns += b[63-i];\n}\no[i] = s;",
        64,
        64,
    ),
    "barrier for other memory": (
        "race",
        {7},
        "threadgroup float b[64];\nb[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\no[i] = b[63-i];",
        64,
        64,
    ),
    "all write one element": ("race", {4}, "o[0] = x[i];\no[i] = x[i];", 64, 64),
    "threadgroups overlap": ("race", {4, 5}, "o[i % 32] = x[i];\nif (i >= 32) o[i] = 0;", 64, 32),
    "lanes taken to be in step": ("race", {5, 6}, "threadgroup float b[32];\nb[l] = x[i];\no[i] = b[31-l];", 32, 32),
    "threadgroup memory never set": (
        "uninitialised",
        {7},
        "threadgroup float b[64];\nif (l == 0) b[i] = 1;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = b[i];",
        64,
        64,
    ),
    "output read before it is written": ("uninitialised", {4}, "o[i] += x[i];", 64, 64),
    "barrier in a branch": (
        "divergence",
        {5},
        "if (i < 40)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = 1;",
        64,
        64,
    ),
    "two barriers in two branches": (
        "divergence",
        {5, 7},
        "if (i < 32)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nelse\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = 1;",
        64,
        64,
    ),
    "return before a barrier": (
        "divergence",
        {5},
        "if (i >= 60) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = 1;",
        64,
        64,
    ),
    "simd_sum in a branch": ("divergence", {5}, "float s = 0; if (l < 16)\ns = simd_sum(x[i]);\ns += simd_max(s);\no[i] = s;", 64, 64),
    "shuffle in a loop of uneven length": (
        "inactive-lane",
        {6},
        "float s = x[i];\nfor (uint j = 0; j < l % 3 + 1; j++)\ns += simd_shuffle_xor(s, 1);\no[i] = s;",
        64,
        64,
    ),
    "index past a local array": ("bounds", {5}, "float v[4];\nfor (int j = 0; j <= int(x[0]) + 4; j++) v[j] = j;\no[i] = v[3];", 64, 64),
    "shift by 32": ("shift", {5}, "uint s = uint(x[0]) + 32;\no[i] = float(1u << s);", 64, 64),
    "integer division by zero": ("division", {5}, "int d = int(x[0]);\no[i] = float(int(i) / d);", 64, 64),
    "negative float to uint8": ("conversion", {5}, "float v = x[i] - 3.0f;\no[i] = float(uint8_t(v));", 64, 64),
    "part of the output": ("unwritten", {None}, "if (i < 10) o[i] = 1;", 64, 64),
    "misaligned vector": ("misaligned", {4}, "float4 v = *(const device float4*)(x + 1);\no[i] = v.x;", 64, 64),
    "too much threadgroup memory": ("threadgroup-memory", {None}, "threadgroup float b[8200];\nb[i] = x[i]; o[i] = b[i];", 64, 64),
    "past a threadgroup array into the next": (
        "bounds",
        {6},
        "threadgroup float a[64]; threadgroup float b[64];\nb[i] = x[i]; device float* out = o;\n"
        "threadgroup float* p = a; p[i + 1] = x[i];\nout[i] = b[i];",
        64,
        64,
    ),
    "wide load past the end": ("bounds", {4}, "ulong4 v = *(const device ulong4*)(x + (i / 8) * 8 + 8); o[i] = v.x;", 64, 64),
}  # fmt: skip


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_caught(bug, order):
    kind, lines, body, n, group = BUGS[bug]
    with pytest.raises(EmulatorError) as caught:
        run(body, n=n, group=group, order=order)
    matching = [finding for finding in caught.value.findings if finding.kind == kind]
    assert matching, f"expected {kind}, got:\n{caught.value}"
    assert matching[0].line in lines, str(caught.value)
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
    assert (race.place.caller.file, race.place.caller.line) == ("seeded.metal", 5)
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
    with pytest.raises(CompileError, match=r"seeded\.metal:4:"):
        run(body, n=n, group=n, mode="strict", header=header)


WELL_TYPED = {
    "device pointer": ("const device float* p = x + i; o[i] = *p;", "", 64),
    "large input is in device": ("o[i] = f(x);", F, 64),
    "literal without suffix": ("o[i] = max(x[i], 0.5) * 2.0;", "", 64),
    "bfloat from float": ("bfloat b = x[i]; o[i] = b;", "", 64),
    "swizzles": ("float4 v = float4(x[i]); v.xy = v.wz; o[i] = v.x + v.zyx.y;", "", 64),
}


@pytest.mark.parametrize("name", WELL_TYPED)
def test_strict_mode_accepts(name):
    body, header, n = WELL_TYPED[name]
    run(body, n=n, group=n, mode="strict", header=header)
