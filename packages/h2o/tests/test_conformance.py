"""H2O under the checks that every method passes; Keyformer's run has a budget in shares, under the same policy."""

import pytest

from mlx_kv.testing import CHECKS, check_name


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    check("h2o(heavy=60, recent=40)")
