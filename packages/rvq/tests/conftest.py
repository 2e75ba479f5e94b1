"""What the tests with kernels share."""

import os

import pytest

from mlx_kv_kernels import UnavailableBackendError, resolve_backend
from mlx_kv_kernels.testing import legs, not_run

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA, the reference's float32 matmuls would round to 10 bits


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("kernels ran on: " + (", ".join(map(str, legs())) or "nothing"))
    for backend, reason in not_run().items():
        terminalreporter.write_line(f"kernels did not run on {backend}: {reason}")


@pytest.fixture
def emulated():
    """Skips a test that only the emulator can run, where it cannot."""
    try:
        resolve_backend("emulator")
    except UnavailableBackendError as error:
        pytest.skip(str(error))
