"""`mlx_kv perplexity`: what a method costs on real text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mlx_kv_cli import console
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.options import Json, Methods, Model

if TYPE_CHECKING:
    from mlx_kv_cli.perplexity import PerplexityResult


def perplexity(
    model: Model,
    method: Methods = None,
    text: Annotated[str, typer.Option(help="A text file, or a topic of Python's own documentation.")] = "typesseq",
    tokens: Annotated[int, typer.Option(min=4, help="Use the first so many tokens of the text.")] = 1536,
    prefill: Annotated[int, typer.Option(min=2, help="Tokens given as the prompt; the rest are scored.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per teacher-forced step.")] = 32,
    kv_bits: Annotated[
        list[int] | None, typer.Option(help="Also measure mlx-lm's own quantised cache at so many bits; repeatable.")
    ] = None,
    kv_group_size: Annotated[int, typer.Option(help="Group size of mlx-lm's own quantised cache.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure perplexity through compressed caches, beside the full cache on the same tokens."""
    from mlx_kv_cli.caches import cache_factory, quantized_factory
    from mlx_kv_cli.perplexity import FULL, perplexities
    from mlx_kv_cli.report import environment
    from mlx_kv_cli.texts import read_text

    content = read_text(text)
    loaded = console.load(model)
    ids = loaded.tokenizer.encode(content)[:tokens]
    if len(ids) < prefill + 2:
        raise UserError(f"--text and --tokens give {len(ids)} tokens, --prefill {prefill} needs {prefill + 2}")
    factories = {spec: cache_factory(loaded, spec) for spec in method or []}
    for bits in kv_bits or []:
        name = f"mlx-lm kv_bits={bits} kv_group_size={kv_group_size}"
        factories[name] = quantized_factory(loaded, bits, kv_group_size)
    with console.progress("Scoring") as on_progress:
        results = perplexities(loaded.model, ids, factories, prefill, chunk, on_progress)
    if as_json:
        protocol = {"text": text, "tokens": len(ids), "prefill": prefill, "chunk": chunk}
        full = asdict(results.pop(FULL))
        rows = [{"method": name, **asdict(result)} for name, result in results.items()]
        facts = {"model": model, "dtype": loaded.dtype, **protocol, "full": full, "results": rows}
        console.print_json({**facts, "environment": environment()})
    else:
        console.out.print(_table(results))


def _table(results: dict[str, PerplexityResult]) -> Table:
    from mlx_kv_cli.report import megabytes

    table = Table("cache", title=f"Perplexity of {next(iter(results.values())).tokens} tokens")
    for heading in ("perplexity", "ratio", "KL (nats)", "same top-1", "held", "as fp16"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.perplexity:.3f} ± {result.perplexity * result.standard_error:.3f}",
            f"{result.ratio:.3f} ± {result.ratio_standard_error:.3f}",
            f"{result.kl_divergence:.4f}",
            f"{result.top1_agreement:.1%}",
            megabytes(result.bytes_held),
            megabytes(result.fp16_bytes),
        )
    return table
