import socket

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from mlx_kv_cli.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2, loaded with every connection refused: the packaged model must need no network."""

    def refuse(*_: object) -> None:
        raise AssertionError("--model smollm2 must not open a connection")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        return load_model("smollm2")


@pytest.fixture
def tiny() -> Model:
    """A random two-layer llama in float32 with a vocabulary of 128."""
    mx.random.seed(0)
    args = ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=128,
        head_dim=32,
    )
    model = Model(args)
    mx.eval(model.parameters())
    return model
