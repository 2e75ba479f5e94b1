import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_kv_kernels import UnavailableBackendError, backends, gather_rows, resolve_backend, topk_rows


@pytest.fixture
def machine(monkeypatch):
    """Pretends to be a machine: with a GPU backend or without, its default device, the emulator there or not."""

    def be(metal=False, cuda=False, default=mx.cpu, emulator=(True, "A compiler was found.")):
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(mx, "default_device", lambda: default)
        module = emulator and SimpleNamespace(available=lambda: emulator)
        monkeypatch.setitem(sys.modules, "mlx_kv_emulator", module)  # None makes the import fail
        monkeypatch.delenv("MLX_KV_BACKEND", raising=False)

    return be


def test_auto_is_the_gpu_of_the_default_device_else_the_reference_and_never_the_emulator(machine):
    machine(metal=True, default=mx.gpu)
    assert resolve_backend() == "metal"
    machine(cuda=True, default=mx.gpu)
    assert resolve_backend() == resolve_backend("auto") == "cuda"
    machine(metal=True, default=mx.cpu)
    assert resolve_backend() == "reference"
    machine()
    assert resolve_backend() == "reference"


def test_the_argument_wins_over_the_environment(machine, monkeypatch):
    machine()
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    assert resolve_backend() == "emulator"
    assert resolve_backend("reference") == "reference"
    assert resolve_backend("auto") == "reference"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("metal", "This build of MLX has no Metal backend, or found no Metal device."),
        ("cuda", "This build of MLX has no CUDA backend, or found no CUDA device."),
        ("emulator", "The package mlx-kv-emulator is not installed."),
    ],
)
def test_a_backend_asked_for_by_name_never_falls_back(machine, monkeypatch, name, missing):
    machine(emulator=None)
    scores, rows, indices = mx.zeros((1, 1, 9)), mx.zeros((1, 1, 9, 8)), mx.zeros((1, 1, 1), dtype=mx.uint32)
    with pytest.raises(UnavailableBackendError, match=f"backend='{name}'.*{missing}"):
        topk_rows(scores, 2, backend=name)
    with pytest.raises(UnavailableBackendError, match=f"backend='{name}'.*{missing}"):
        gather_rows(rows, indices, backend=name)
    monkeypatch.setenv("MLX_KV_BACKEND", name)
    with pytest.raises(UnavailableBackendError, match=f"MLX_KV_BACKEND='{name}'.*{missing}"):
        topk_rows(scores, 2)


def test_backends_says_why_not(machine):
    machine(metal=True, default=mx.cpu, emulator=(False, "No compiler: install ziglang."))
    assert backends()["metal"] == (
        False,
        "Metal is there, but MLX's default device is the CPU: call mx.set_default_device(mx.gpu).",
    )
    assert backends()["cuda"][0] is False
    assert backends()["emulator"] == (False, "No compiler: install ziglang.")
    assert backends()["reference"][0] is True
    with pytest.raises(UnavailableBackendError, match="install ziglang"):
        resolve_backend("emulator")


def test_an_error_inside_the_emulator_is_not_taken_for_its_absence(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.delitem(sys.modules, "mlx_kv_emulator")
    (tmp_path / "mlx_kv_emulator.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        backends()


def test_refuses_an_unknown_name(machine, monkeypatch):
    machine()
    with pytest.raises(
        ValueError, match=r"expected backend one of auto, metal, cuda, emulator, reference, got 'vulkan'"
    ):
        resolve_backend("vulkan")
    monkeypatch.setenv("MLX_KV_BACKEND", "gpu")
    with pytest.raises(ValueError, match=r"expected MLX_KV_BACKEND one of .* got 'gpu'"):
        resolve_backend()
