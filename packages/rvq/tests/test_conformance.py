"""RVQ under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    """Of the default's kind, with centred keys; other options and policies have tests of their own."""
    check("rvq(residual=32, rollback=8)")
