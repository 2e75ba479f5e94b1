"""`mlx_kv fit`: codebooks from a text, for a method that is trained on a model's own keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_kv_cli import console
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.options import Json, Model


def fit(
    output: Annotated[Path, typer.Argument(help="The file to write, ending in .safetensors.")],
    model: Model,
    text: Annotated[str, typer.Option(help="A text file, or a topic of Python's own documentation.")] = "specialnames",
    tokens: Annotated[int, typer.Option(min=2, help="Use the first so many tokens of the text.")] = 2048,
    method: Annotated[str, typer.Option(help="The method to fit for.")] = "trained_rvq",
    seed: Annotated[int, typer.Option(help="Of the first guesses.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit a method's codebooks to what a model makes of a text, and save them for that model alone."""
    import mlx.core as mx

    from mlx_kv import CompressedKVCache, SpecError, make_prompt_cache
    from mlx_kv.plugins import load_method
    from mlx_kv_cli import lm
    from mlx_kv_cli.perplexity import PREFILL_STEP
    from mlx_kv_cli.report import environment
    from mlx_kv_cli.texts import read_text

    try:
        config = load_method(method)
    except SpecError as error:
        raise UserError(f"--method {method}: {error}") from error
    fit_rows = getattr(config, "fit", None)
    if fit_rows is None:
        raise UserError(f"--method {method}: this method has nothing to fit")
    content = read_text(text)
    loaded = console.load(model)
    ids = loaded.tokenizer.encode(content)[:tokens]
    cache = make_prompt_cache(loaded.model, "dense")
    for begin in range(0, len(ids), PREFILL_STEP):
        lm.feed(loaded.model, mx.array([ids[begin : begin + PREFILL_STEP]]), cache)
    layers = {i: layer for i, layer in enumerate(cache) if isinstance(layer, CompressedKVCache)}
    rows = {i: layer.keys_and_values() for i, layer in layers.items()}
    fingerprint = next(iter(layers.values())).origin["model"]
    try:
        with console.progress("Fitting") as on_progress:
            nbytes = fit_rows(rows, fingerprint, str(output), seed, on_progress)
    except (ValueError, OSError, RuntimeError) as error:  # MLX tells of a file it cannot write by a RuntimeError
        raise UserError(f"cannot fit {method}: {error}") from error
    if as_json:
        facts = {
            "model": model,
            "method": method,
            "text": text,
            "tokens": len(ids),
            "seed": seed,
            "layers": len(layers),
        }
        console.print_json({**facts, "output": str(output), "bytes": nbytes, "environment": environment()})
    else:
        console.out.print(f"{output}: codebooks of {len(layers)} layers, {nbytes / 1e6:.1f} MB, from {len(ids)} tokens")
        console.out.print(f'Use them with --method "{method}(codebooks={str(output)!r})"', markup=False, soft_wrap=True)
