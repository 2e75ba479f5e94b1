import json
import sys

import pytest

from mlx_kv_cli import console
from mlx_kv_cli.main import main
from mlx_kv_kernels import backend as backends_module
from mlx_kv_kernels import selftest
from mlx_kv_kernels.selftest import Case


def passes(backend: str) -> None:
    pass


def fails(backend: str) -> None:
    raise AssertionError(f"wrong on {backend}")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `mlx_kv selftest` over given cases on given backends; returns (exit code, stdout, stderr)."""

    def call(cases, usable, *arguments):
        answers = {
            name: (lambda name=name: (name in usable, f"{name} is missing")) for name in backends_module.BACKENDS
        }
        monkeypatch.setattr(backends_module, "_USABLE", answers)
        monkeypatch.setattr(selftest, "collect", lambda: [("some-package", case) for case in cases])
        monkeypatch.setattr(sys, "argv", ["mlx_kv", "selftest", *arguments])
        monkeypatch.setattr(console.out, "width", 200)
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


GOOD, BAD = Case("pack_keys", "2 bit", passes), Case("pack_keys", "4 bit", fails)


@pytest.mark.parametrize(
    ("cases", "usable", "arguments", "code"),
    [
        ([GOOD], ["metal", "emulator"], [], 0),
        ([GOOD], ["emulator"], [], 1),
        ([GOOD], ["emulator"], ["--allow-cpu"], 0),
        ([GOOD, BAD], ["metal"], [], 1),
        ([GOOD, BAD], ["emulator"], ["--allow-cpu"], 1),
        ([], ["metal"], [], 1),
    ],
)
def test_exit_code(run, cases, usable, arguments, code):
    assert run(cases, usable, *arguments)[0] == code


def test_what_did_not_run_is_said_with_the_reason(run):
    _, out, err = run([GOOD, BAD], ["cuda"])
    assert "metal: did not run: metal is missing" in out
    assert "cuda: 1 passed, 1 failed" in out
    assert "pack_keys (4 bit) on cuda: AssertionError: wrong on cuda" in err


def test_json(run):
    code, out, _ = run([GOOD], ["emulator"], "--json")
    facts = json.loads(out)
    assert code == 1
    assert facts["ran_on_gpu"] is False
    statuses = {result["backend"]: (result["status"], result["reason"]) for result in facts["results"]}
    assert statuses == {
        "metal": ("not run", "metal is missing"),
        "cuda": ("not run", "cuda is missing"),
        "emulator": ("passed", ""),
    }
    assert facts["machine"]["mlx"]
