"""Runs a compiled kernel over a grid."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

from . import abi, report
from .buffers import Arena, Argument
from .counters import Launch, Traffic, record
from .errors import EmulatorError, Finding
from .library import LOCK, Kernel, load, runtime
from .report import Triple
from .settings import Settings

MAX_THREADS = 1024
MAX_THREADGROUP_MEMORY = 32768


def launch(
    name: str,
    path: Path,
    arguments: Sequence[Argument | None],
    grid: Triple,
    threadgroup: Triple,
    settings: Settings,
    allow: Sequence[str] = (),
) -> None:
    """Runs the kernel library at `path` and writes the results into the writable arguments.

    Raises:
        EmulatorError: the kernel did something undefined that is not in `allow`.
        ValueError: more than 1024 threads in a threadgroup.
    """
    x, y, z = (min(t, g) for t, g in zip(threadgroup, grid, strict=True))  # as MLX does
    size = (x, y, z)
    if math.prod(size) > MAX_THREADS:
        raise ValueError(f"[{name}] expected at most {MAX_THREADS} threads in a threadgroup, got {math.prod(size)}")
    kernel = load(path)
    memory = kernel.threadgroup_memory
    if memory > MAX_THREADGROUP_MEMORY:
        message = f"{memory} bytes of threadgroup memory, over the limit of {MAX_THREADGROUP_MEMORY}"
        raise EmulatorError(name, settings.mode, [Finding("threadgroup-memory", message)])
    threadgroups = math.prod(-(-g // s) for g, s in zip(grid, size, strict=True)) if min(grid) > 0 else 0
    facts = Launch(name, settings.mode, grid, size, threadgroups, memory)
    found: list[Finding] = []
    if threadgroups:
        facts, found = _run(facts, kernel, arguments, settings, allow)
    elif "unwritten" not in allow:
        found = [
            _unwritten(a.name, a.data.nbytes, 0)
            for a in arguments
            if a and a.writable and not a.initialised and a.data.nbytes
        ]
    if found:
        raise EmulatorError(name, settings.mode, found)
    record(facts)


def _run(
    facts: Launch, kernel: Kernel, arguments: Sequence[Argument | None], settings: Settings, allow: Sequence[str]
) -> tuple[Launch, list[Finding]]:
    arena = Arena(arguments)
    present = [(a, address) for a, address in zip(arguments, arena.addresses, strict=True) if a]
    buffers = (abi.Buffer * max(1, len(present)))(
        *(abi.Buffer(address, a.data.nbytes, a.writable, a.initialised, a.name.encode()) for a, address in present)
    )
    pointers = arena.pointers()
    records = (abi.FindingRecord * abi.MAX_FINDINGS)()
    run = abi.LaunchRecord(
        entry=kernel.entry,
        arguments=ctypes.cast(pointers, ctypes.c_void_p),
        grid=facts.grid,
        threadgroup=facts.threadgroup,
        reverse=settings.order,
        checked=settings.mode == "check",
        allowed=sum(1 << abi.KINDS.index(kind) for kind in set(allow)),
        threadgroup_begin=kernel.threadgroup_begin,
        threadgroup_end=kernel.threadgroup_end,
        image_begin=kernel.image_begin,
        image_end=kernel.image_end,
        arena_begin=arena.begin,
        arena_end=arena.end,
        buffers=buffers,
        buffer_count=len(present),
        variables=kernel.variables,
        variable_count=kernel.variable_count,
        sites=kernel.sites,
        findings=records,
        finding_capacity=abi.MAX_FINDINGS,
    )
    with LOCK:
        status = runtime().msl_run(ctypes.byref(run))
    found = report.findings(run, facts.grid, facts.threadgroup)
    if status or (run.abandoned and not found):
        raise MemoryError(f"[{facts.kernel}] no memory for the launch")
    if settings.mode == "check" and not run.abandoned and "unwritten" not in allow:
        found += [_unwritten(b.name.decode(), b.unwritten, b.first_unwritten) for b in buffers if b.unwritten]
    arena.copy_back()
    return _with_counts(facts, run, buffers[: len(present)]), found


def _unwritten(name: str, count: int, first: int) -> Finding:
    return Finding("unwritten", f"{count} bytes of output '{name}' were never written, the first at byte {first}")


def _with_counts(facts: Launch, run: abi.LaunchRecord, buffers: Sequence[abi.Buffer]) -> Launch:
    traffic = {
        b.name.decode(): Traffic(b.size, b.bytes_read, b.distinct_bytes_read, b.bytes_written, b.distinct_bytes_written)
        for b in buffers
    }
    return Launch(
        facts.kernel,
        facts.mode,
        facts.grid,
        facts.threadgroup,
        facts.threadgroups,
        facts.threadgroup_memory,
        run.barriers,
        run.simdgroup_barriers,
        run.simd_operations,
        traffic if facts.mode == "check" else {},
    )
