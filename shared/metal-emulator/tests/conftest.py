import os
from pathlib import Path

import pytest

import mlx_kv_emulator


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Objects are built afresh once per test session, unless a folder for them is given."""
    if "MLX_KV_EMULATOR_CACHE" not in os.environ:
        os.environ["MLX_KV_EMULATOR_CACHE"] = str(tmp_path_factory.mktemp("objects"))
    return Path(os.environ["MLX_KV_EMULATOR_CACHE"])


@pytest.fixture(scope="session", autouse=True)
def _usable():
    usable, reason = mlx_kv_emulator.available()
    if not usable:
        pytest.skip(reason)
