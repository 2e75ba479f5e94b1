"""The commands in one Typer application. Each imports mlx only when it runs, so that help comes at once."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from mlx_kv_cli import console
from mlx_kv_cli.commands import evaluate, fit, generate, methods, perplexity, selftest

app = typer.Typer(
    help="Compress the KV cache of any mlx-lm model: generate with it, and measure what it saves and what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"mlx_kv {importlib.metadata.version('mlx-kv-cli')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Hold the options that come before the command."""


app.command("fit")(fit.fit)
app.command("generate")(generate.generate)
app.command("methods")(methods.methods)
app.command("perplexity")(perplexity.perplexity)
app.command("selftest")(selftest.selftest)
app.add_typer(evaluate.app, name="evaluate")
