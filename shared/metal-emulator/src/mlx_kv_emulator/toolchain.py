"""Finds a compiler and runs it."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import CompileError, UnavailableError

OLDEST_CLANG = 19
MACOS = sys.platform == "darwin"


@dataclass(frozen=True)
class Toolchain:
    """The commands of a compiler.

    Attributes:
        compile: clang itself, which makes objects of kernels.
        link: makes a shared library of objects; what they call, the process has.
        build: compiles the runtime, which uses the system's headers.
        identity: changes when the compiler does.
    """

    compile: tuple[str, ...]
    link: tuple[str, ...]
    build: tuple[str, ...]
    identity: str


def run(command: Sequence[str | Path]) -> None:
    """Runs a compiler; CompileError with its messages when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"{command[0]} failed with status {done.returncode}")


def processor_flags() -> list[str]:
    """Flags for this machine: half precision and fused multiply-add in hardware."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-march=x86-64-v3"]
    if machine in ("arm64", "aarch64"):
        return ["-mcpu=apple-m1"] if MACOS else ["-march=armv8.2-a+fp16"]
    raise UnavailableError(f"no fiber switch for the processor {machine!r}: x86-64 and aarch64 are supported")


def _clang_version(command: str) -> tuple[int, str] | None:
    if not shutil.which(command):
        return None
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    # Apple numbers its own clang: 17 there is LLVM 19.
    found = re.search(r"(Apple )?clang version (\d+)", done.stdout)
    if done.returncode or not found:
        return None
    return int(found[2]) + (2 if found[1] else 0), done.stdout.splitlines()[0]


def _clang(command: str, version: str) -> Toolchain:
    shared = ("-dynamiclib", "-undefined", "dynamic_lookup") if MACOS else ("-shared", "-nostdlib")
    return Toolchain((command,), (command, *shared), (command,), f"{command} {version}")


def _zig() -> Toolchain | None:
    package = importlib.util.find_spec("ziglang")
    if not package or not package.origin:
        return None
    zig = str(Path(package.origin).parent / ("zig.exe" if sys.platform == "win32" else "zig"))
    version = subprocess.run([zig, "version"], capture_output=True, text=True, check=False).stdout.strip()
    # `zig cc` costs more per call than the tools it contains, but only it can link for macOS.
    link = (zig, "cc", "-dynamiclib", "-undefined", "dynamic_lookup") if MACOS else (zig, "ld.lld", "-shared")
    return Toolchain((zig, "clang"), link, (zig, "cc"), f"ziglang {version}")


@functools.cache
def toolchain() -> Toolchain:
    """MLX_KV_CLANG, a clang of the oldest usable version or newer on the PATH, or the package ziglang."""
    given = os.environ.get("MLX_KV_CLANG")
    for command in [given] if given else ["clang", *(f"clang-{n}" for n in range(OLDEST_CLANG, OLDEST_CLANG + 6))]:
        version = _clang_version(command)
        if version and version[0] >= OLDEST_CLANG:
            return _clang(command, version[1])
    if given:
        raise UnavailableError(f"MLX_KV_CLANG={given} is not a clang {OLDEST_CLANG} or newer")
    zig = _zig()
    if not zig:
        raise UnavailableError(f"no compiler: install the package ziglang, or a clang {OLDEST_CLANG} or newer")
    return zig


def available() -> tuple[bool, str]:
    """Whether kernels can run here, and if not, why: a sentence that names what is missing."""
    if sys.platform not in ("linux", "darwin"):
        return False, f"the emulator runs on Linux and macOS, not on {sys.platform}"
    try:
        processor_flags()
        toolchain()
    except UnavailableError as error:
        return False, str(error)
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpuinfo.exists() and " avx2 " not in cpuinfo.read_text():
        return False, "the processor has no AVX2, which compiled kernels use"
    return True, ""
