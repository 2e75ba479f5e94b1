import subprocess
import sys

import pytest

from mlx_kv_cli import blas

needs_openblas = pytest.mark.skipif(
    not (blas.uses_cpu_backend() and blas._is_installed(blas.OPENBLAS)),
    reason="not a Linux CPU with ngsolve-openblas (there is no build of it for this platform)",
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@needs_openblas
def test_openblas_is_loaded_before_mlx_and_wins():
    done = python(
        """
import ctypes, sys
from mlx_kv_cli.blas import load_openblas
path = load_openblas()
assert "mlx.core" not in sys.modules and "mlx" not in sys.modules
import mlx.core as mx
import numpy as np
# The address that libmlx binds is the first cblas_sgemm in the global scope: it lies in OpenBLAS.
address = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    if low <= address < high:
        assert line.split()[-1] == str(path), line
        break
else:
    raise AssertionError("cblas_sgemm is nowhere")
a, b = (np.random.default_rng(0).standard_normal(shape) for shape in ((70, 300), (300, 50)))
product = np.array(mx.array(a.astype(np.float32)) @ mx.array(b.astype(np.float32)))
# 300 products of float32 numbers of size one: rounding stays far below 1e-4.
assert np.abs(product - a @ b).max() < 1e-4
print("fine")
"""
    )
    assert done.stdout == "fine\n", done.stderr


@needs_openblas
def test_too_late_is_an_error_not_a_silent_slow_run():
    done = python(
        """
import mlx.core
from mlx_kv_cli import blas
try:
    blas.load_openblas()
except blas.BlasError as error:
    print(error)
"""
    )
    assert done.stdout == "mlx was imported before OpenBLAS could be loaded; call load_openblas() first\n", done.stderr


@needs_openblas
def test_a_library_that_cannot_be_loaded_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "libopenblas.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(blas, "_files", lambda *_: [broken])
    monkeypatch.delitem(sys.modules, "mlx.core")
    with pytest.raises(blas.BlasError, match="cannot be loaded"):
        blas.load_openblas.__wrapped__()


@pytest.mark.parametrize(
    ("platform", "installed", "expected"),
    [
        ("linux", {"mlx-cpu"}, True),
        ("linux", {"mlx-cpu", "mlx-cuda-12"}, False),
        ("linux", {"mlx-cuda-13"}, False),
        ("darwin", {"mlx-cpu"}, False),
    ],
)
def test_only_the_linux_cpu_backend_wants_it(monkeypatch, platform, installed, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(blas, "_is_installed", installed.__contains__)
    assert blas.uses_cpu_backend() is expected
    if not expected:
        assert blas.load_openblas.__wrapped__() is None
