"""H2O under the checks of policies that add up attention."""

import pytest

from mlx_kv.testing.accumulation_checks import ACCUMULATION_CHECKS


@pytest.mark.parametrize("check", ACCUMULATION_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_accumulation(check):
    check("h2o(heavy=20, recent=12)")
