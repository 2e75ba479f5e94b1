"""What a launch raises, and the facts in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class CompileError(RuntimeError):
    """A kernel that is no valid Metal. The message is the compiler's, with the lines of the `.metal` source."""


class UnavailableError(RuntimeError):
    """Kernels cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    """A position in the kernel's source; `caller` is where the function that holds it was called."""

    file: str
    line: int
    column: int = 0
    caller: Place | None = None

    def __str__(self) -> str:
        """`file:line:column`, and where it was called from."""
        text = f"{self.file}:{self.line}" + (f":{self.column}" if self.column else "")
        return text + (f" (called from {self.caller})" if self.caller else "")


@dataclass(frozen=True)
class Thread:
    """Where one thread stood: positions are (x, y, z)."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    in_threadgroup: tuple[int, int, int]
    simdgroup: int
    lane: int

    def __str__(self) -> str:
        """One line with all positions."""
        return (
            f"thread {self.grid} of the grid: {self.in_threadgroup} in threadgroup {self.threadgroup}, "
            f"simdgroup {self.simdgroup}, lane {self.lane}"
        )


@dataclass(frozen=True)
class Access:
    """One side of a finding: what a thread did, and where. `place` is None when the compiler lost the line."""

    action: str
    thread: Thread | None
    place: Place | None

    def __str__(self) -> str:
        """One line: action, place, thread."""
        return "  ".join(str(part) for part in (f"{self.action:<8}", self.place or "", self.thread or "") if part)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a launch.

    Attributes:
        kind: one of `mlx_kv_emulator.KINDS`.
        message: one sentence without the place.
        accesses: the thread that was caught, then the one it collided with, if any.
    """

    kind: str
    message: str
    accesses: tuple[Access, ...] = ()

    @property
    def place(self) -> Place | None:
        """Where it happened: the innermost line of the kernel's source."""
        return self.accesses[0].place if self.accesses else None

    @property
    def line(self) -> int | None:
        """The line of `place`."""
        return self.place.line if self.place else None

    def __str__(self) -> str:
        """The place and the message, then a line for every access."""
        place = self.place
        head = (f"{place.file}:{place.line}: " if place else "") + f"{self.kind}: {self.message}"
        return "\n".join([head, *(f"    {access}" for access in self.accesses)])


class EmulatorError(RuntimeError):
    """A kernel that did something undefined. `findings` has the facts, the message is the report."""

    def __init__(self, kernel: str, mode: str, findings: Sequence[Finding]) -> None:
        """Writes the report; `findings` are in the order in which they happened."""
        self.kernel = kernel
        self.mode = mode
        self.findings = tuple(findings)
        noun = "finding" if len(self.findings) == 1 else "findings"
        lines = [f"[{kernel}] {len(self.findings)} {noun} in mode {mode}", *map(str, self.findings)]
        super().__init__("\n".join(lines))
