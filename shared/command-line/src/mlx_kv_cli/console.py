"""What people see: results on stdout, everything else (progress, notes, errors) on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from mlx_kv_cli.models import LoadedModel

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(facts: Any) -> None:
    """One JSON object on stdout, in plain text whatever the terminal."""
    out.file.write(json.dumps(facts, indent=2) + "\n")


def note(text: str) -> None:
    """A remark on stderr."""
    err.print(f"note: {text}", style="dim", markup=False, soft_wrap=True)


def error(text: str) -> None:
    """The one line that says why a command failed."""
    err.print(f"error: {' '.join(text.split())}", style="red", markup=False, soft_wrap=True)


def load(name: str) -> LoadedModel:
    """Load a model, showing what is going on, and pass its notes on."""
    from mlx_kv_cli.models import load_model

    if err.is_terminal:
        with err.status("") as status:
            loaded = load_model(name, lambda text: status.update(f"{text} ..."))
    else:
        loaded = load_model(name, lambda text: err.print(f"{text} ...", markup=False, soft_wrap=True))
    for text in loaded.notes:
        note(text)
    return loaded


@contextmanager
def progress(description: str) -> Generator[Callable[[int, int], None]]:
    """Show a bar on a terminal; yields `update(done, total)`. The bar goes away when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()  # what follows may write to the same terminal

        yield update
