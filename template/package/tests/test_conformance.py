"""Example under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    check("example(budget=100)")
