"""Loads OpenBLAS before any test imports mlx: on Linux the tests on a real model are then many times faster."""

try:
    from mlx_kv_cli.blas import load_openblas
except ImportError:
    BLAS = "MLX's own (mlx-kv-cli, which loads OpenBLAS, is not installed)"
else:
    BLAS = str(load_openblas() or "MLX's own (nothing to load: see mlx_kv_cli.blas)")


def pytest_report_header() -> str:
    return f"blas: {BLAS}"
