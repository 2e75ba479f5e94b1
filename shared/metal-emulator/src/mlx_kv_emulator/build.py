"""Compiles kernels and the runtime into shared libraries in the cache."""

from __future__ import annotations

import functools
import platform
import re
from importlib.metadata import version
from pathlib import Path

from .cache import build_once, digest
from .errors import CompileError
from .includes import MSL_FOLDER, prelude
from .instrument import instrument
from .rewrite import to_cpp
from .settings import Contract, Mode
from .toolchain import MACOS, processor_flags, run, toolchain

RUNTIME_FOLDER = Path(__file__).parent / "runtime"
SUFFIX = ".dylib" if MACOS else ".so"

LANGUAGE = [
    *("-x", "c++", "-std=c++17", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-fsigned-char", "-fno-strict-aliasing", "-Wno-everything", "-ferror-limit=10", "-fno-color-diagnostics"),
    # MSL has no double: a literal without suffix is a float. Every operation on half and bfloat rounds.
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
]
OBJECT = [
    *("-fPIC", "-fvisibility=hidden", "-fno-asynchronous-unwind-tables", "-fno-stack-protector"),
    # A frame larger than the guard page of a fiber's stack must not step over it.
    *(() if MACOS else ("-fstack-clash-protection",)),
    # A variable that was never set holds a pattern that is a NaN as a float.
    "-ftrivial-auto-var-init=pattern",
    # Kernels ask for loops to be unrolled so that arrays become registers. Here that is most of the time of a compile.
    *("-mllvm", "-unroll-threshold=0", "-mllvm", "-pragma-unroll-threshold=0"),
    # Of a loop over 9 numbers that is not unrolled, clang 22's vectorizer forgets the last in some of their maxima.
    "-fno-vectorize",
]
CHECKS = [
    *("-DMSL_CHECKED", "-O1", "-g1", "-fsanitize=thread"),
    "-fsanitize=bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment,bool",
    "-fsanitize-recover=all",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-atomics=0"),  # the runtime is told of these by msl/atomic.h
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
]


@functools.cache
def _everything_else() -> str:
    """A digest of what every object depends on besides its own source and flags."""
    files = sorted(p for p in (*MSL_FOLDER.rglob("*"), *RUNTIME_FOLDER.iterdir()) if p.is_file())
    here = Path(__file__)
    own = [p.read_bytes() for p in (*files, here, here.with_name("instrument.py"), here.with_name("sites.py"))]
    return digest(version("mlx-kv-emulator"), toolchain().identity, platform.machine(), *processor_flags(), *own)


def runtime_library() -> Path:
    """The runtime as a shared library, built on first use."""
    flags = ["-std=c++20", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]

    def build(scratch: Path, target: Path) -> None:
        # Without the system's libraries, which the process has: zig would build its own first, for half a minute.
        objects = [scratch / f"{source.stem}.o" for source in sorted(RUNTIME_FOLDER.glob("*.cpp"))]
        for made in objects:
            run([*toolchain().build, *flags, "-c", RUNTIME_FOLDER / f"{made.stem}.cpp", "-o", made])
        run([*toolchain().link, *objects, "-o", target])

    return build_once(f"runtime-{digest(_everything_else(), *flags)}{SUFFIX}", build)


def _front_end(contract: Contract) -> list[str]:
    return [*toolchain().compile, *LANGUAGE, *processor_flags(), f"-ffp-contract={contract}", "-I", str(MSL_FOLDER)]


def _precompiled(source: str, flags: list[str]) -> tuple[str, list[str]]:
    """A kernel's source without MLX's prelude, and flags to have clang load the prelude as it has read it before.

    Reading it is half of the time that most kernels take.
    """
    first = to_cpp(prelude())
    if not source.startswith(first):
        return source, flags

    def write(_scratch: Path, target: Path) -> None:
        target.write_text(first)

    header = build_once(f"prelude-{digest(first)}.h", write)

    def build(_scratch: Path, target: Path) -> None:
        run([*flags, "-x", "c++-header", "-Xclang", "-fno-pch-timestamp", header, "-o", target])

    precompiled = build_once(f"prelude-{digest(_everything_else(), *flags, first)}.pch", build)
    return source[len(first) :], [*flags, "-include-pch", str(precompiled)]


def kernel_library(name: str, source: str, mode: Mode, contract: Contract) -> Path:
    """A kernel as a shared library; in mode check it is instrumented.

    Raises:
        CompileError: the source is no valid MSL.
    """
    checked = mode == "check"
    flags = [*_front_end(contract), *OBJECT, *(CHECKS if checked else ["-O2"])]

    def build(scratch: Path, target: Path) -> None:
        text, assembly, made = scratch / "kernel.cpp", scratch / "kernel.ll", scratch / "kernel.o"
        own, with_prelude = _precompiled(source, flags)
        text.write_text(own)
        if checked:
            _compile(name, [*with_prelude, "-S", "-emit-llvm", text, "-o", assembly])
            assembly.write_text(instrument(assembly.read_text()))
            back_end = [*toolchain().compile, "-x", "ir", *processor_flags(), "-O0", "-Xclang", "-disable-llvm-passes"]
            run([*back_end, "-fPIC", "-Wno-everything", "-c", assembly, "-o", made])
        else:
            _compile(name, [*with_prelude, "-c", text, "-o", made])
        run([*toolchain().link, made, "-o", target])

    return build_once(f"{_file_name(name)}-{digest(_everything_else(), *flags, source)}{SUFFIX}", build)


def check_types(name: str, source: str, instance: str = "") -> None:
    """Strict mode: CompileError unless the source is well-typed with Metal's address spaces. A pass is remembered.

    `instance` is the template to instantiate, as `f<float>`.
    """
    flags = [*_front_end("on"), "-DMSL_STRICT"]
    source += f"\ntemplate decltype({instance}) {instance};\n" if instance else ""

    def build(scratch: Path, target: Path) -> None:
        text = scratch / "kernel.cpp"
        own, with_prelude = _precompiled(source, flags)
        text.write_text(own)
        _compile(name, [*with_prelude, "-fsyntax-only", text])
        target.touch()

    build_once(f"{_file_name(name)}-{digest(_everything_else(), *flags, source)}.strict", build)


def _compile(name: str, command: list[str | Path]) -> None:
    try:
        run(command)
    except CompileError as error:
        raise CompileError(f"[{name}] does not compile:\n{error}") from None


def _file_name(kernel: str) -> str:
    return re.sub(r"\W+", "_", kernel)[:60] or "kernel"
