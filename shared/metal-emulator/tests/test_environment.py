"""Settings, the cache, compilers, and many callers at once."""

import concurrent.futures
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_kv_emulator
from mlx_kv_emulator import (
    EmulatorError,
    build,
    cache,
    current_settings,
    includes,
    last_launch,
    metal_kernel,
    toolchain,
)
from mlx_kv_emulator.attributes import entry_point
from mlx_kv_emulator.build import RUNTIME_FOLDER
from mlx_kv_emulator.instrument import instrument
from mlx_kv_emulator.rewrite import kernel_parameters, to_cpp

COPY = "o[thread_position_in_grid.x] = x[thread_position_in_grid.x];"


def run(kernel, n=64, **options):
    arguments = dict(inputs=[mx.arange(n, dtype=mx.float32)], output_shapes=[(n,)], output_dtypes=[mx.float32])
    return kernel(**arguments, grid=(n, 1, 1), threadgroup=(32, 1, 1), **options)[0]


def test_settings_nest_and_end(monkeypatch):
    for name in ("MODE", "ORDER", "CONTRACT"):
        monkeypatch.delenv(f"MLX_KV_EMULATOR_{name}", raising=False)
    assert current_settings() == mlx_kv_emulator.Settings("run", 0, "on")
    with mlx_kv_emulator.settings(mode="check"):
        with mlx_kv_emulator.settings(order=1):
            assert current_settings() == mlx_kv_emulator.Settings("check", 1, "on")
        assert current_settings().order == 0
    monkeypatch.setenv("MLX_KV_EMULATOR_MODE", "strict")
    monkeypatch.setenv("MLX_KV_EMULATOR_ORDER", "1")
    monkeypatch.setenv("MLX_KV_EMULATOR_CONTRACT", "off")
    assert current_settings() == mlx_kv_emulator.Settings("strict", 1, "off")


def test_call_beats_kernel_beats_block():
    with mlx_kv_emulator.settings(mode="strict"):
        kernel = metal_kernel("who", ["x"], ["o"], COPY, mode="check")
        run(kernel)
        assert last_launch().mode == "check"
        run(kernel, mode="run")
        assert last_launch().mode == "run"
        run(metal_kernel("who", ["x"], ["o"], COPY))
        assert last_launch().mode == "strict"


@pytest.mark.parametrize("wrong", [dict(mode="fast"), dict(order=2), dict(contract="maybe")])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"\[emulator\] expected"), mlx_kv_emulator.settings(**wrong):
        pass


def test_allowed_findings_pass():
    partial = "if (thread_position_in_grid.x < 10) o[thread_position_in_grid.x] = 1;"
    with pytest.raises(EmulatorError):
        run(metal_kernel("partial", ["x"], ["o"], partial, mode="check"))
    run(metal_kernel("partial", ["x"], ["o"], partial, mode="check", allow=("unwritten",)))
    race = "o[0] = x[0]; o[thread_position_in_grid.x] = 1;"
    run(metal_kernel("race", ["x"], ["o"], race, mode="check", allow=("race",)))
    with pytest.raises(ValueError, match=r"kinds to allow out of .*, got 'bounds'"):
        metal_kernel("race", ["x"], ["o"], race, allow=("bounds",))


def test_objects_are_reused(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_KV_EMULATOR_CACHE", str(tmp_path / "cache"))
    kernel = metal_kernel("reused", ["x"], ["o"], COPY + "// reused")
    run(kernel)
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    assert any(p.name.startswith("reused-") for p in made)
    run(kernel)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()} == made


@pytest.mark.parametrize("changed", [dict(contract="off"), dict(mode="check")])
def test_everything_that_matters_is_in_the_name(tmp_path, monkeypatch, changed):
    monkeypatch.setenv("MLX_KV_EMULATOR_CACHE", str(tmp_path))
    kernel = metal_kernel("key", ["x"], ["o"], COPY)
    run(kernel)
    run(kernel, **changed)
    assert len(list(tmp_path.glob("key-*"))) == 2


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_KV_EMULATOR_CACHE", str(tmp_path))

    def build(_folder, target):
        target.write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cache.build_once("object", build)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_KV_EMULATOR_CACHE", str(tmp_path))

    def build(_folder, target):
        with target.open("w") as file:
            file.write("first ")
            file.flush()
            assert not (tmp_path / "object").exists()
            file.write("second")

    assert cache.build_once("object", build).read_text() == "first second"


def test_cache_folder_follows_the_platform(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_KV_EMULATOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache.cache_folder() == tmp_path / "mlx-kv-emulator"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    monkeypatch.setattr(cache.Path, "home", lambda: tmp_path)
    assert cache.cache_folder() == tmp_path / "Library" / "Caches" / "mlx-kv-emulator"


def test_threads_do_not_disturb_each_other():
    """Two kernels, one of which fails, from eight threads at once."""
    good = metal_kernel("good", ["x"], ["o"], "threadgroup float b[32]; uint l = thread_index_in_simdgroup;\nb[l] = "
                        "x[thread_position_in_grid.x];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
                        "o[thread_position_in_grid.x] = b[31 - l];", mode="check")  # fmt: skip
    bad = metal_kernel("bad", ["x"], ["o"], "o[thread_position_in_grid.x + 1] = 1;", mode="check")
    x = mx.arange(64, dtype=mx.float32)
    expected = x.reshape(2, 32)[:, ::-1].reshape(-1).tolist()

    def work(index):
        if index % 2:
            with pytest.raises(EmulatorError, match=r"\[bad\] 1 finding"):
                run(bad)
            return expected
        return run(good).tolist()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(work, range(64)))


def test_a_kernel_loads_while_another_runs():
    """Its library's own functions are instrumented: called during a launch, they were taken for a part of it."""
    program = (
        "import threading, mlx.core as mx, mlx_kv_emulator as e\n"
        "def start(name, body):\n"
        "    kernel = e.metal_kernel(name, ['x'], ['o'], body, mode='check')\n"
        "    return kernel(inputs=[mx.arange(8.0)], output_shapes=[(8,)], output_dtypes=[mx.float32],\n"
        "                  grid=(8, 1, 1), threadgroup=(8, 1, 1))[0]\n"
        "index = 'thread_position_in_grid.x'\n"
        "long = f'for (int i = 0; i < 10000; i++) o[{index}] = x[{index}];'\n"
        "stop, started = threading.Event(), threading.Event()\n"
        "def run():\n"
        "    while not stop.is_set():\n"
        "        start('long', long)\n"
        "        started.set()\n"
        "thread = threading.Thread(target=run)\n"
        "thread.start()\n"
        "started.wait()\n"
        "for n in range(5):\n"
        "    assert start(f'new{n}', f'o[{index}] = {n};').tolist() == [n] * 8\n"
        "stop.set()\n"
        "thread.join()\n"
    )
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], check=True, timeout=300)


def test_processes_share_an_empty_cache(tmp_path):
    program = (
        "import mlx.core as mx, mlx_kv_emulator as e\n"
        f"k = e.metal_kernel('shared', ['x'], ['o'], {COPY!r})\n"
        "o = k(inputs=[mx.arange(8.0)], output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(8, 1, 1),\n"
        "      threadgroup=(8, 1, 1))\n"
        "print(o[0].sum())"
    )
    environment = {**os.environ, "MLX_KV_EMULATOR_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert ["28" in output for output in outputs] == [True] * 3
    assert not list(tmp_path.glob("build-*"))


def test_available_names_what_is_missing(monkeypatch):
    assert mlx_kv_emulator.available() == (True, "")
    toolchain.toolchain.cache_clear()
    try:
        monkeypatch.setenv("MLX_KV_CLANG", "/no/such/clang")
        assert mlx_kv_emulator.available() == (False, "MLX_KV_CLANG=/no/such/clang is not a clang 19 or newer")
        monkeypatch.delenv("MLX_KV_CLANG")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
        toolchain.toolchain.cache_clear()
        usable, reason = mlx_kv_emulator.available()
        assert not usable
        assert "install the package ziglang, or a clang 19 or newer" in reason
        monkeypatch.setattr(toolchain.platform, "machine", lambda: "riscv64")
        assert "riscv64" in mlx_kv_emulator.available()[1]
    finally:
        toolchain.toolchain.cache_clear()


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "x86_64-linux-gnu", "aarch64-macos", "x86_64-macos"])
def test_runtime_builds_for_every_platform(tmp_path, target):
    """The fiber switch of another processor cannot run here, but it assembles."""
    zig = Path(importlib.util.find_spec("ziglang").origin).parent / "zig"
    flags = ["-std=c++20", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
    magic = b"\xcf\xfa\xed\xfe" if "macos" in target else b"\x7fELF"
    for source in sorted(RUNTIME_FOLDER.glob("*.cpp")):
        made = tmp_path / f"{source.stem}.o"
        subprocess.run([zig, "cc", "-target", target, *flags, "-c", source, "-o", made], check=True)
        assert made.read_bytes().startswith(magic)


KERNEL = """#include <metal_stdlib>
using namespace metal;
[[kernel]] void k(const device float* x, device float* o, uint i [[thread_position_in_grid]]) {
  threadgroup float b[64];
  b[i] = simd_sum(metal::exp(x[i]));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = b[63 - i];
}
"""


@pytest.mark.parametrize("processor", ["aarch64", "x86_64"])
def test_kernels_build_for_macos(tmp_path, processor):
    """Both modes compile; nothing here can load the result."""
    zig = Path(importlib.util.find_spec("ziglang").origin).parent / "zig"
    text = to_cpp(KERNEL)
    text += entry_point("k", kernel_parameters(text, "k"))[0]
    (tmp_path / "k.cpp").write_text(text)
    clang = [zig, "clang", f"--target={processor.replace('aarch64', 'arm64')}-apple-macos13"]
    front = [*clang, *build.LANGUAGE, "-fPIC", "-I", includes.MSL_FOLDER, tmp_path / "k.cpp"]
    subprocess.run([*front, "-O2", "-c", "-o", tmp_path / "run.o"], check=True)
    subprocess.run([*front, *build.CHECKS, "-S", "-emit-llvm", "-o", tmp_path / "k.ll"], check=True)
    (tmp_path / "k.ll").write_text(instrument((tmp_path / "k.ll").read_text()))
    subprocess.run([*clang, "-x", "ir", "-O0", "-c", tmp_path / "k.ll", "-o", tmp_path / "check.o"], check=True)
    for name in ("run", "check"):
        assert b"_msl_entry" in (tmp_path / f"{name}.o").read_bytes()
