"""What the integration tests share: the packaged real model, loaded once."""

import pytest

from mlx_kv_cli.models import load_model


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, with its tokenizer."""
    return load_model("smollm2")
