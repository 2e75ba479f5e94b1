"""For tests of packages with kernels: parity on every usable backend, and mutation of kernel text.

Needs hypothesis and numpy (the extra `testing`).
"""

from .mutants import Mutant, mutated, surviving_mutants
from .parity import Leg, check_case, check_parity, legs, not_run
from .values import FAMILIES, array, arrays

__all__ = [
    "FAMILIES",
    "Leg",
    "Mutant",
    "array",
    "arrays",
    "check_case",
    "check_parity",
    "legs",
    "mutated",
    "not_run",
    "surviving_mutants",
]
