"""Keyformer under the checks of policies that add up attention."""

import pytest

from mlx_kv.testing.accumulation_checks import ACCUMULATION_CHECKS


@pytest.mark.parametrize("check", ACCUMULATION_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_accumulation(check):
    check("keyformer(budget=32, recent=0.4)")
