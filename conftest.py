"""For all packages' tests: OpenBLAS before mlx is imported, and a summary of what was measured and what did not run."""

import atexit
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the tests run in two processes
# On CUDA MLX multiplies float32 with 10 bits unless told not to: tolerances here mean float32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Each of the processes that the tests start would compile all of mlx-lm, 2 s: for this run Python has a folder.
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="bytecode-")
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)

try:
    from mlx_kv_cli.blas import load_openblas
except ImportError:
    BLAS = "MLX's own (mlx-kv-cli, which loads OpenBLAS, is not installed)"
else:
    BLAS = str(load_openblas() or "MLX's own (nothing to load: see mlx_kv_cli.blas)")


def pytest_report_header() -> str:
    return f"blas: {BLAS}"


@pytest.fixture(scope="session")
def shown():
    """Tables that the summary shows whatever becomes of the tests: append text to it."""
    return []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    tables = item.funcargs.get("shown") if hasattr(item, "funcargs") else None
    if tables:
        report.user_properties += [("shown", table) for table in tables]  # travels between processes with the report
        tables.clear()
    return report


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "shown":
                    terminalreporter.write_line(f"\n{value}")
    try:
        from mlx_kv_kernels.testing import legs, not_run
    except ImportError:
        return
    terminalreporter.write_line("kernels ran on: " + (", ".join(map(str, legs())) or "nothing"))
    for backend, reason in not_run().items():
        terminalreporter.write_line(f"kernels did not run on {backend}: {reason}")
