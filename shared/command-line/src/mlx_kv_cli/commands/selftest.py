"""`mlx_kv selftest`: every kernel of every installed package, compiled and checked on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_kv_cli import console
from mlx_kv_cli.options import Json

if TYPE_CHECKING:
    from mlx_kv_kernels.selftest import Result

GPU_BACKENDS = ("metal", "cuda")


def selftest(
    allow_cpu: Annotated[
        bool, typer.Option("--allow-cpu", help="Succeed where no GPU backend can run (the emulator's results count).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile every installed kernel variant on this machine and compare it with its reference.

    Exits with 1 if a case failed, or if none ran on a GPU and --allow-cpu was not given.
    """
    from mlx_kv_kernels.selftest import collect
    from mlx_kv_kernels.selftest import selftest as run

    cases = collect()
    results: list[Result] = []
    with console.progress("Kernels") as update:
        for result in run(cases):
            results.append(result)
            update(len(results), 3 * len(cases))
    failed = any(result.status == "failed" for result in results)
    on_gpu = any(result.backend in GPU_BACKENDS and result.status == "passed" for result in results)
    if as_json:
        machine = _machine()
        console.print_json(
            {"machine": machine, "ran_on_gpu": on_gpu, "results": [asdict(result) for result in results]}
        )
    else:
        _print(results)
    if not on_gpu:
        console.note("no kernel ran on a GPU" + ("" if allow_cpu else "; --allow-cpu accepts that"))
    if failed or not (on_gpu or allow_cpu):
        raise typer.Exit(1)


def _print(results: Sequence[Result]) -> None:
    table = Table("package", "kernel", "variant", "metal", "cuda", "emulator")
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        row = rows.setdefault((result.package, result.kernel, result.variant), {})
        row[result.backend] = "-" if result.status == "not run" else result.status
    for names, row in rows.items():
        table.add_row(*names, *(row.get(backend, "-") for backend in ("metal", "cuda", "emulator")))
    console.out.print(table)
    for result in results:
        if result.status == "failed":
            console.error(f"{result.kernel} ({result.variant}) on {result.backend}: {result.reason}")
    counts = Counter((result.backend, result.status) for result in results)
    reasons = {result.backend: result.reason for result in results if result.status == "not run"}
    for backend in ("metal", "cuda", "emulator"):
        passed, broken = counts[backend, "passed"], counts[backend, "failed"]
        said = f"did not run: {reasons[backend]}" if backend in reasons else f"{passed} passed, {broken} failed"
        console.out.print(f"{backend}: {said}", markup=False, soft_wrap=True)


def _machine() -> dict[str, Any]:
    import mlx.core as mx

    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "device": dict(mx.device_info()),
        "mlx": importlib.metadata.version("mlx"),
    }
