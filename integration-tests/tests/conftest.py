"""What the integration tests share: the packaged real model, loaded once."""

import pytest
from mlx_kv_cli.models import load_model


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, with its tokenizer."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def print_always(request):
    """Print a table below the test's name whether or not the test passes."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}")

    return write
