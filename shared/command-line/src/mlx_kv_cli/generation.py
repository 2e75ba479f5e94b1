"""One generation through a cache, with the facts about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_kv_cli import lm
from mlx_kv_cli.models import LoadedModel
from mlx_kv_cli.report import CacheReport, cache_report


@dataclass(frozen=True)
class Generation:
    """What was generated; speeds in tokens per second, as mlx-lm counts them."""

    text: str
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    finish_reason: str | None
    """"stop" or "length"."""
    peak_memory_bytes: int
    """MLX's peak since the model was loaded, weights included."""
    cache: CacheReport


def run(
    loaded: LoadedModel,
    prompt: Sequence[int],
    cache: lm.Cache,
    *,
    max_tokens: int,
    sampling: lm.Sampling,
    prefill_step_size: int = 2048,
    on_text: Callable[[str], None] = lambda text: None,
    on_prefill: Callable[[int, int], None] = lambda done, total: None,
) -> Generation:
    """Generate up to `max_tokens` (at least 1) after `prompt` through `cache`, which is filled in place."""
    mx.reset_peak_memory()
    text, last = "", None
    for last in lm.stream(
        loaded.model,
        loaded.tokenizer,
        prompt,
        cache,
        max_tokens=max_tokens,
        sampling=sampling,
        prefill_step_size=prefill_step_size,
        on_prefill=on_prefill,
    ):
        text += last.text
        on_text(last.text)
    if last is None:
        raise RuntimeError("mlx-lm generated nothing")
    return Generation(
        text=text,
        prompt_tokens=last.prompt_tokens,
        prompt_tps=last.prompt_tps,
        generation_tokens=last.generation_tokens,
        generation_tps=last.generation_tps,
        finish_reason=last.finish_reason,
        peak_memory_bytes=mx.get_peak_memory(),
        cache=cache_report(cache),
    )
