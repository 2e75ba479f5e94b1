"""`mlx_kv fit`: what it writes, and what it refuses."""

import json
import sys

import pytest

from mlx_kv import make_prompt_cache
from mlx_kv.testing import tiny_model
from mlx_kv_cli import console
from mlx_kv_cli.main import main
from mlx_kv_cli.models import LoadedModel

pytestmark = pytest.mark.needs("trained_rvq")


class Tokenizer:
    """A token for each character."""

    has_chat_template = False

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) % 128 for c in text]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `mlx_kv fit` for a tiny model; returns (exit code, stdout, stderr)."""
    loaded = LoadedModel("tiny", tiny_model("llama"), Tokenizer(), "float32")
    monkeypatch.setattr(console, "load", lambda name: loaded)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["mlx_kv", "fit", *map(str, arguments), "--model", "tiny"])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err, loaded.model

    return call


def test_what_is_written_serves_that_model_alone(run, tmp_path):
    file = tmp_path / "codebooks.safetensors"
    code, out, _, model = run(file, "--tokens", 300, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["tokens"], facts["layers"], facts["output"]) == (300, len(model.layers), str(file))
    assert facts["bytes"] == 2 * len(model.layers) * 8 * 256 * 32 * 2
    spec = f"trained_rvq(codebooks={str(file)!r})"
    assert len(make_prompt_cache(model, spec)) == len(model.layers)
    with pytest.raises(ValueError, match="was fitted for another model"):
        make_prompt_cache(tiny_model("llama", seed=1), spec)


def test_the_spec_to_go_on_with_is_shown(run, tmp_path):
    file = tmp_path / "codebooks.safetensors"
    _, out, _, _ = run(file, "--tokens", 300)
    assert f'--method "trained_rvq(codebooks={str(file)!r})"' in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.safetensors", "--tokens", "20"], "cannot fit trained_rvq: [trained_rvq] expected at least 256 vectors"),
        (["x.bin", "--tokens", "300"], "expected a name ending in .safetensors, got"),
        (["x.safetensors", "--method", "dense"], "--method dense: this method has nothing to fit"),
        (["x.safetensors", "--method", "nothing"], "no method 'nothing' is installed"),
    ],
)
def test_mistakes_are_told(run, tmp_path, arguments, message):
    code, out, err, _ = run(tmp_path / arguments[0], *arguments[1:])
    assert (code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())
