"""RVQ under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name

SPECS = ["rvq(residual=32)", "rvq(key_bits=3, value_bits=1, stages=2, residual=0, sinks=0, center=False, rollback=8)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, spec):
    check(spec)
