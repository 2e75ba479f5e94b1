"""H2O under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name

SPECS = ["h2o(heavy=60, recent=40)", "h2o(heavy=0.2, recent=20, every_chunk=True)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, spec):
    check(spec)
