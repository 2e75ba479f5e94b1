"""What launches cost: bytes moved, barriers, SIMD operations."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .settings import Mode


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer that a launch touched.

    `bytes_read` and `bytes_written` add up the accesses of all threads; the distinct numbers count each byte once. A
    kernel that reads each byte of a buffer exactly once has `bytes_read == distinct_bytes_read == nbytes`. An atomic
    read-modify-write counts as a read and as a write.
    """

    nbytes: int
    bytes_read: int
    distinct_bytes_read: int
    bytes_written: int
    distinct_bytes_written: int


@dataclass(frozen=True)
class Launch:
    """What one launch did.

    Attributes:
        kernel: its name.
        mode: the mode it ran in.
        grid: threads in x, y, z.
        threadgroup: threads of a full threadgroup, after MLX's rule that none is larger than the grid.
        threadgroups: how many ran.
        threadgroup_memory: bytes of threadgroup memory per threadgroup.
        barriers: threadgroup barriers, each counted once per threadgroup that passed it.
        simdgroup_barriers: simdgroup barriers, each counted once per simdgroup.
        simd_operations: SIMD functions (sums, shuffles, matrix products...), each counted once per simdgroup.
        buffers: traffic by buffer name, shapes and strides included. Empty except in mode check.
    """

    kernel: str
    mode: Mode
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threadgroups: int
    threadgroup_memory: int
    barriers: int = 0
    simdgroup_barriers: int = 0
    simd_operations: int = 0
    buffers: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])

    @property
    def bytes_read(self) -> int:
        """Bytes read from all buffers."""
        return sum(buffer.bytes_read for buffer in self.buffers.values())

    @property
    def bytes_written(self) -> int:
        """Bytes written to all buffers."""
        return sum(buffer.bytes_written for buffer in self.buffers.values())


_last: ContextVar[Launch | None] = ContextVar("mlx_kv_emulator_last_launch", default=None)
_collecting: ContextVar[tuple[list[Launch], ...]] = ContextVar("mlx_kv_emulator_counters", default=())


def record(launch: Launch) -> None:
    """Makes `launch` the last one of this thread and adds it to every open `counters` block."""
    _last.set(launch)
    for launches in _collecting.get():
        launches.append(launch)


def last_launch() -> Launch | None:
    """The last launch of this thread that ran to its end; None before the first."""
    return _last.get()


@contextmanager
def counters() -> Generator[list[Launch]]:
    """Collects this thread's launches inside the `with` block, in order."""
    launches: list[Launch] = []
    token = _collecting.set((*_collecting.get(), launches))
    try:
        yield launches
    finally:
        _collecting.reset(token)
