"""Keyformer under the checks that every method passes."""

import pytest

from mlx_kv.testing import CHECKS, check_name

SPECS = ["keyformer(budget=100)", "keyformer(budget=0.5, steps=16, every_chunk=True)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, spec):
    check(spec)
