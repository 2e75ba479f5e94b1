"""Perplexity through a compressed cache, next to the full cache on the same tokens.

The text is fed as mlx-lm feeds a prompt (all but the last prompt token in large pieces, then that token alone, which
is when prompt-time policies evict), and then teacher-forced in small chunks, so that what is scored is always
predicted from the compressed cache. The full cache runs in lockstep and gives the distributions to compare with. Where
they can, all caches go through the model as one batch, which reads its weights once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_kv import memory_report
from mlx_kv_cli import lm
from mlx_kv_cli.together import Lockstep

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PREFILL_STEP = 2048
FULL = "full"


@dataclass(frozen=True)
class PerplexityResult:
    """How well the text was predicted through one cache, and how far that is from the full cache."""

    perplexity: float
    """exp(mean_nll)."""
    mean_nll: float
    """Nats per token."""
    standard_error: float
    """Of mean_nll."""
    tokens: int
    """How many were scored."""
    kl_divergence: float
    """Mean KL(full || this cache) of the next-token distributions, in nats."""
    top1_agreement: float
    """Share of positions where both caches have the same most likely token."""
    full_perplexity: float
    """Perplexity of the same tokens through the full cache."""
    ratio: float
    """perplexity / full_perplexity."""
    ratio_standard_error: float
    """Of ratio, from the paired differences per token."""
    bytes_held: int
    """By this cache at the end, room for growth included."""
    fp16_bytes: int
    """What an fp16 cache of the same tokens holds."""


def perplexity(
    model: lm.Model, tokens: Sequence[int], cache_factory: lm.CacheFactory, prefill: int = 512, chunk: int = 32
) -> PerplexityResult:
    """Perplexity of `tokens[prefill:]` through the cache that `cache_factory` makes.

    prefill: tokens given as the prompt, at least 2; chunk: tokens per teacher-forced step.
    Raises ValueError when fewer than two tokens would be scored, or the model is under `mlx_kv.install`.
    """
    return perplexities(model, tokens, {"": cache_factory}, prefill, chunk)[""]


def perplexities(
    model: lm.Model,
    tokens: Sequence[int],
    factories: Mapping[str, lm.CacheFactory],
    prefill: int = 512,
    chunk: int = 32,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, PerplexityResult]:
    """As `perplexity`, for several caches in one pass; the full cache is in the result under "full" as well.

    `on_progress(done, total)` hears of the tokens fed so far.
    """
    if prefill < 2 or chunk < 1:
        raise ValueError(f"[perplexity] expected prefill >= 2 and chunk >= 1, got {prefill} and {chunk}")
    if len(tokens) < prefill + 2:
        raise ValueError(f"[perplexity] expected at least {prefill + 2} tokens (prefill and two), got {len(tokens)}")
    ids = mx.array(list(tokens))
    runs = {FULL: _Run(lm.full_cache(model)), **{name: _Run(factory()) for name, factory in factories.items()}}
    lockstep = Lockstep(model, [run.cache for run in runs.values()])
    for start, end in _spans(len(tokens), prefill, chunk):
        piece = ids[None, start:end]
        if end < prefill:
            lockstep.feed(piece)
        else:
            reference: _Reference | None = None
            batch = lockstep.logits(mx.repeat(piece, len(runs), axis=0))
            for run, logits in zip(runs.values(), batch, strict=True):
                log_p = _log_softmax(logits)
                reference = reference or _Reference(log_p, _exp(log_p), mx.argmax(log_p, axis=-1))  # the full cache's
                run.score(log_p, reference, ids[start + 1 : end + 1])
        mx.clear_cache()
        on_progress(end, len(tokens) - 1)
    full = runs[FULL]
    fp16_bytes = memory_report(full.cache).fp16_bytes
    return {name: run.result(full, fp16_bytes) for name, run in runs.items()}


class _Reference(NamedTuple):
    """The distributions [tokens, vocabulary] through the full cache, and the likeliest tokens."""

    log_p: mx.array
    p: mx.array
    top: mx.array


@dataclass
class _Run:
    """One cache on its way through the text, with a number per scored token."""

    cache: lm.Cache
    nll: list[float] = field(default_factory=list[float])
    kl: list[float] = field(default_factory=list[float])
    agree: list[float] = field(default_factory=list[float])

    def score(
        self,
        log_p: Float[mx.array, "tokens vocabulary"],
        reference: _Reference,
        targets: Int[mx.array, " tokens"],
    ) -> None:
        nll = -mx.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
        kl = mx.sum(reference.p * (reference.log_p - log_p), axis=-1)
        agree = (mx.argmax(log_p, axis=-1) == reference.top).astype(mx.float32)
        for total, values in ((self.nll, nll), (self.kl, kl), (self.agree, agree)):
            total.extend(cast("list[float]", values.tolist()))

    def result(self, full: _Run, fp16_bytes: int) -> PerplexityResult:
        mean, count = fmean(self.nll), len(self.nll)
        difference = [mine - theirs for mine, theirs in zip(self.nll, full.nll, strict=True)]
        ratio = math.exp(fmean(difference))
        return PerplexityResult(
            perplexity=math.exp(mean),
            mean_nll=mean,
            standard_error=stdev(self.nll) / math.sqrt(count),
            tokens=count,
            kl_divergence=fmean(self.kl),
            top1_agreement=fmean(self.agree),
            full_perplexity=math.exp(fmean(full.nll)),
            ratio=ratio,
            ratio_standard_error=ratio * stdev(difference) / math.sqrt(count),
            bytes_held=sum(layer.nbytes for layer in self.cache),
            fp16_bytes=fp16_bytes,
        )


def _spans(total: int, prefill: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Pieces [start, end) to feed: the prompt, its last token alone, then chunks; the last token is only a target."""
    for start in range(0, prefill - 1, PREFILL_STEP):
        yield start, min(start + PREFILL_STEP, prefill - 1)
    yield prefill - 1, prefill
    for start in range(prefill, total - 1, chunk):
        yield start, min(start + chunk, total - 1)


def _log_softmax(logits: Float[mx.array, "tokens vocabulary"]) -> Float[mx.array, "tokens vocabulary"]:
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    return logits - mx.log(mx.sum(_exp(logits), axis=-1, keepdims=True))


def _exp(values: mx.array) -> mx.array:
    """exp, which MLX's CPU backend computes one number at a time and NumPy five times as fast."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return mx.exp(values)
    return mx.array(np.exp(np.asarray(values, np.float32)))
