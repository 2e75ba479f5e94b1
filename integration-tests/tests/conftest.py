"""What the integration tests share: the packaged real model, loaded once, and the wheels, built once."""

import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mlx_kv import methods
from mlx_kv_cli.models import load_model

ROOT = Path(__file__).parents[2]
INSTALLED = {method.name for method in methods()} | {point.name for point in entry_points(group="mlx_kv.attention")}


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(*methods): skipped where a method's folder is not in the tree")
    config.addinivalue_line("markers", "slow: more than a minute")


def pytest_collection_modifyitems(items):
    """The longest file first: two processes then end together, and the model is converted when others come to it."""
    items.sort(key=lambda item: item.path.name != "test_perplexity.py" or item.path.parent != Path(__file__).parent)


def pytest_runtest_setup(item):
    """Any one method may be taken out of the tree: what is about it goes, and the rest stays green."""
    needed = {method for mark in item.iter_markers("needs") for method in mark.args}
    if missing := needed - INSTALLED:
        pytest.skip(f"not in this tree: {', '.join(sorted(missing))}")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, with its tokenizer."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def uv():
    """Run uv, which `uv run` tells the place of, and fail with what it says."""

    def run(*arguments):
        command = [os.environ.get("UV", "uv"), *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def wheels(uv, tmp_path_factory):
    """The folder of every member's wheel, built as for publishing: without the workspace's sources."""
    folder = tmp_path_factory.mktemp("wheels")
    uv("build", "--all-packages", "--no-sources", "--wheel", "--out-dir", folder)
    return folder
