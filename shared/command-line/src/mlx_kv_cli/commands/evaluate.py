"""`mlx_kv evaluate`: whether a task still works through a compressed cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_kv_cli import console
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.options import Json, Methods, Model

if TYPE_CHECKING:
    from mlx_kv_cli.passkey import Filler, PasskeyResult

FULL = "full"

app = typer.Typer(help="Run a task through compressed caches, beside the full cache.", no_args_is_help=True)


@app.callback()
def tasks() -> None:
    """Hold the tasks."""


@app.command()
def passkey(
    model: Model,
    method: Methods = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens; may be repeated.", show_default="1440")
    ] = None,
    depths: Annotated[
        str, typer.Option(help="Where the key hides: 0 is the start, 1 the end.")
    ] = "0.1,0.3,0.5,0.7,0.9",
    seeds: Annotated[int, typer.Option(min=1, help="Different keys and fillers per length and depth.")] = 4,
    filler: Annotated[
        list[str] | None,
        typer.Option(help="repeated (sentences) or documentation; may be repeated.", show_default="both"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hide a five-digit key in a long text and ask for it."""
    from mlx_kv_cli.caches import cache_factory
    from mlx_kv_cli.passkey import FILLERS, passkeys
    from mlx_kv_cli.report import environment

    for name in filler or []:
        if name not in FILLERS:
            raise UserError(f"--filler expected {' or '.join(FILLERS)}, got {name}")
    chosen = set(filler or FILLERS)
    fillers: list[Filler] = [text for text in FILLERS if {text} <= chosen]
    places, lengths = _numbers(depths), length or [1440]
    loaded = console.load(model)
    factories = {FULL: cache_factory(loaded, None), **{spec: cache_factory(loaded, spec) for spec in method or []}}
    results: dict[str, list[PasskeyResult]] = {name: [] for name in factories}
    for text in fillers:
        with console.progress(text) as on_progress:
            try:
                found = passkeys(
                    loaded.model,
                    loaded.tokenizer,
                    factories,
                    filler=text,
                    lengths=lengths,
                    depths=places,
                    seeds=range(seeds),
                    on_progress=on_progress,
                )
            except ValueError as error:
                raise UserError(str(error)) from error
        for name, result in found.items():
            results[name].append(result)
    if as_json:
        rows = [
            {"method": name, **asdict(result), "successes": result.successes, "trials": result.trials}
            for name, group in results.items()
            for result in group
        ]
        facts = {"model": model, "dtype": loaded.dtype, "seeds": seeds, "results": rows}
        console.print_json({**facts, "environment": environment()})
    else:
        console.out.print(_table(results, lengths, places))


def _table(results: dict[str, list[PasskeyResult]], lengths: list[int], depths: list[float]) -> Table:
    table = Table("cache", "filler", title="Keys found")
    for length in lengths:
        for depth in depths:
            table.add_column(f"{length} @ {depth:g}", justify="right")
    table.add_column("all", justify="right")
    for name, group in results.items():
        for result in group:
            cells = [f"{cell.successes}/{cell.trials}" for cell in result.cells]
            table.add_row(name, result.filler, *cells, f"{result.successes}/{result.trials}")
    return table


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--depths expected numbers between 0 and 1, such as 0.1,0.5,0.9, got {text}") from None
