"""KIVI under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name

SPECS = ["kivi(residual=32)", "kivi(bits=4, residual=64, sinks=0, rollback=8, defer=True)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, spec):
    check(spec)
