"""Proof that a kernel's tests would notice a bug: each small change of its text must make them fail."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from .. import source
from ..backend import emulator
from ..kernel import Kernel
from ..launch import forget_launches


@dataclass(frozen=True)
class Mutant:
    """A change of a kernel's text: `old`, which stands there once, becomes `new`.

    `equivalent` gives the reason why no test can tell the two apart; such a mutant has to survive.
    """

    old: str
    new: str
    equivalent: str = ""


def surviving_mutants(kernel: Kernel, mutants: Sequence[Mutant], check: Callable[[], object]) -> list[Mutant]:
    """The mutants that `check` does not notice, those listed as equivalent left out.

    `check` runs the kernel on the emulator, in check mode (safe with any text), and raises where the result is wrong.

    Raises:
        ValueError: a mutant's `old` does not stand in the text exactly once, the mutant does not compile, or one that
            is listed as equivalent is noticed.
    """
    check()  # the kernel as it is must pass
    survivors: list[Mutant] = []
    for mutant in mutants:
        with mutated(kernel, mutant):
            noticed = _fails(check, mutant)
        if mutant.equivalent and noticed:
            raise ValueError(f"[{kernel.name}] listed as equivalent, but the check notices it: {mutant}")
        if not mutant.equivalent and not noticed:
            survivors.append(mutant)
    return survivors


@contextmanager
def mutated(kernel: Kernel, mutant: Mutant) -> Generator[None]:
    """While the block runs, the kernel has the mutant's text."""
    names = [f"kernels/{name}" for name in (kernel.filename, *[f"{helper}.metal" for helper in kernel.helpers])]
    texts, original = {name: source.read(kernel.package, name) for name in names}, source.read
    count = sum(text.count(mutant.old) for text in texts.values())
    if count != 1 or mutant.old == mutant.new:
        raise ValueError(f"[{kernel.name}] expected once in the text, got {count} times: {mutant.old!r}")

    def read(package: str, name: str) -> str:
        own = package == kernel.package and name in texts
        return texts[name].replace(mutant.old, mutant.new) if own else original(package, name)

    forget_launches()
    try:
        with mock.patch.object(source, "read", read):
            yield
    finally:
        forget_launches()


def _fails(check: Callable[[], object], mutant: Mutant) -> bool:
    try:
        check()
    except emulator().CompileError as error:
        raise ValueError(f"[testing] a mutant that does not compile proves nothing: {mutant}\n{error}") from error
    except (AssertionError, emulator().EmulatorError):
        return True
    return False
