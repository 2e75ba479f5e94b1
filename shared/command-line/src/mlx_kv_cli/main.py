"""The entry point: OpenBLAS first, then the commands; errors become one line and an exit code."""

from __future__ import annotations

import platform
import sys

from mlx_kv_cli import blas, console
from mlx_kv_cli.errors import UserError


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 a bug or a failed machine, 2 the user's to mend, 130 interrupted."""
    try:
        if blas.load_openblas() is None and blas.uses_cpu_backend() and platform.machine() == "x86_64":
            console.note("MLX's own BLAS is slow on this CPU; pip install ngsolve-openblas makes it many times faster")
    except blas.BlasError as error:
        console.note(f"continuing with MLX's own, slower BLAS: {error}")

    from mlx_kv_cli.app import app  # the commands import mlx, so they come after OpenBLAS

    try:
        app(prog_name="mlx_kv")
    except UserError as error:
        console.error(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
