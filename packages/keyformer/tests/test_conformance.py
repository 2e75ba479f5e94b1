"""Keyformer under the checks that every method passes; H2O's run has a budget in rows, under the same policy."""

import pytest

from mlx_kv.testing import CHECKS, check_name


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check):
    check("keyformer(budget=0.5, steps=16, every_chunk=True)")
