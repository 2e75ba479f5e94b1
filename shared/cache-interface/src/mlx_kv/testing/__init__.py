"""Checks that any registered method or combination must pass; needs the extra `testing` of mlx-kv.

A method's package tests itself, with as many specs as it likes, by

    @pytest.mark.parametrize("check", CHECKS, ids=check_name)
    def test_conformance(check):
        check("kivi(bits=3)")

and, where it keeps every row, with the random walks of `mlx_kv.testing.machine.cache_machine`.
"""

from __future__ import annotations

from collections.abc import Callable

from . import batches, copies, files, generation, memory, surface
from .driving import ConformanceError
from .models import tiny_model

Check = Callable[[str], None]

CHECKS: tuple[Check, ...] = tuple(
    function
    for module in (surface, memory, copies, batches, generation, files)
    for name, function in vars(module).items()
    if name.startswith("check_")
)
"""Functions of a spec that raise ConformanceError, with the rule that the method breaks."""


def check_name(check: Check) -> str:
    """Return a check's name for a test's id."""
    return check.__name__.removeprefix("check_")


__all__ = ["CHECKS", "Check", "ConformanceError", "check_name", "tiny_model"]
