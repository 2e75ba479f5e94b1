"""`mlx_kv methods`: what is installed."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from mlx_kv_cli import console
from mlx_kv_cli.options import Json


def methods(as_json: Json = False) -> None:
    """List the installed methods with their options and defaults, and packages that cannot be loaded."""
    import mlx_kv

    found = mlx_kv.methods()
    if as_json:
        console.print_json({"methods": [asdict(method) for method in found]})
        return
    table = Table("method", "kind", "options and defaults", "package", "what it does")
    for method in found:
        if method.error is None:
            options = ", ".join(f"{name}={value}" for name, value in method.options.items())
            row = (method.kind, options, method.summary)
        else:
            row = ("broken", "", f"cannot be loaded: {method.error}")
        table.add_row(method.name, row[0], row[1], f"{method.distribution} {method.version}", row[2])
    console.out.print(table)
    if not found:
        console.note("no method is installed; pip install mlx-kv-kivi, for one")
