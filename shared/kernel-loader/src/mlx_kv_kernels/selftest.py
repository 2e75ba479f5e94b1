"""Runs the kernels of every installed package on this machine: what the command `mlx_kv selftest` prints.

A package registers, in the entry-point group `mlx_kv.selftest`, a function without arguments that returns its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, cast

from .backend import Backend, backends

GROUP = "mlx_kv.selftest"


@dataclass(frozen=True)
class Case:
    """One variant of one kernel.

    Args:
        kernel: the kernel's name.
        variant: what distinguishes this variant, for a reader (`bfloat16, 2 bit, group 32`).
        run: compiles and runs the variant on the backend it is given; raises where the result is not the reference's.
    """

    kernel: str
    variant: str
    run: Callable[[Backend], None]


@dataclass(frozen=True)
class Result:
    """What became of one case on one backend; `reason` says why it failed or did not run."""

    package: str
    kernel: str
    variant: str
    backend: Backend
    status: Literal["passed", "failed", "not run"]
    reason: str = ""


def collect() -> list[tuple[str, Case]]:
    """(package, case) of every installed package that registered cases."""
    found: list[tuple[str, Case]] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        cases = cast(Callable[[], Sequence[Case]], entry.load())
        found += [(entry.name, case) for case in cases()]
    return found


def selftest(
    cases: Sequence[tuple[str, Case]] | None = None, on: Sequence[Backend] = ("metal", "cuda", "emulator")
) -> Iterator[Result]:
    """Run every case (default: `collect()`) on every backend of `on`, yielding each result as it is known."""
    usable = backends()
    for package, case in collect() if cases is None else cases:
        for backend in on:
            runs, reason = usable[backend]
            status, reason = _attempt(case, backend) if runs else ("not run", reason)
            yield Result(package, case.kernel, case.variant, backend, status, reason)


def _attempt(case: Case, backend: Backend) -> tuple[Literal["passed", "failed"], str]:
    try:
        case.run(backend)
    except Exception as error:  # every failure is a line of the report
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""
