"""`mlx_kv generate`: text from a prompt, and what the cache held."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_kv_cli import console
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.options import Json, Method, Model

if TYPE_CHECKING:
    from mlx_kv_cli.generation import Generation


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help='The message to the model; "-" reads it from stdin.')],
    method: Method = None,
    system_prompt: Annotated[str | None, typer.Option(help="The system message for the chat template.")] = None,
    prefill_response: Annotated[str | None, typer.Option(help="How the answer begins.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", min=1, help="Generate at most this many tokens.")
    ] = 100,
    temp: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sampling top-p; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Sampling min-p; 0 is off.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sampling top-k; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    ignore_chat_template: Annotated[bool, typer.Option(help="Give the model the bare prompt.")] = False,
    chat_template_config: Annotated[
        str | None, typer.Option(help="A JSON object of options for the chat template.")
    ] = None,
    prefill_step_size: Annotated[int, typer.Option(min=1, help="Prompt tokens processed at a time.")] = 2048,
    prompt_cache_file: Annotated[
        Path | None,
        typer.Option(help="Continue a cache saved by mlx_kv.save_prompt_cache: the prompt follows what it holds."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate text through a compressed cache, and report speed and memory."""
    import mlx.core as mx

    from mlx_kv_cli import generation, lm, models, report
    from mlx_kv_cli.caches import load_cache, make_cache

    template_options = _json_object(chat_template_config)
    message = sys.stdin.read() if prompt == "-" else prompt
    loaded = console.load(model)
    saved = prompt_cache_file
    cache = make_cache(loaded, method) if saved is None else load_cache(loaded, saved, method)
    tokens = models.encode_prompt(
        loaded.tokenizer,
        message,
        system_prompt=system_prompt,
        prefill_response=prefill_response,
        ignore_chat_template=ignore_chat_template,
        continues=saved is not None,
        **template_options,
    )
    if not tokens:
        raise UserError("the prompt is empty")
    if seed is not None:
        mx.random.seed(seed)
    with console.progress("Reading the prompt") as on_prefill:
        result = generation.run(
            loaded,
            tokens,
            cache,
            max_tokens=max_tokens,
            sampling=lm.Sampling(temp, top_p, min_p, top_k),
            prefill_step_size=prefill_step_size,
            on_text=(lambda _: None) if as_json else _write,
            on_prefill=on_prefill,
        )
    if as_json:
        facts = {"model": model, "method": method, "dtype": loaded.dtype, **asdict(result)}
        console.print_json({**facts, "notes": loaded.notes, "environment": report.environment()})
    else:
        _write("\n" if result.text.endswith("\n") else "\n\n")
        _show(result, method)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show(result: Generation, method: str | None) -> None:
    from mlx_kv_cli.report import megabytes, ranges

    cache = result.cache
    lines = [
        f"Prompt: {result.prompt_tokens} tokens, {result.prompt_tps:.1f} tokens/s",
        f"Generation: {result.generation_tokens} tokens, {result.generation_tps:.1f} tokens/s",
        f"Cache: {megabytes(cache.bytes_held)} held, {megabytes(cache.fp16_bytes)} as fp16"
        + (f" (ratio {cache.ratio:.2f})" if cache.ratio else ""),
        f"Peak memory: {megabytes(result.peak_memory_bytes)}",
    ]
    if method is None and all(layer["method"] is None for layer in cache.layers):
        lines.append("Not compressed: no --method was given")
    else:
        lines += [f"Not compressed: layers {ranges(group.layers)}: {group.reason}" for group in cache.not_compressed]
    for line in lines:
        console.out.print(line, markup=False, soft_wrap=True)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--chat-template-config is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"--chat-template-config expected a JSON object, got {text}")
    return value  # pyright: ignore[reportUnknownVariableType]  # any JSON object will do
