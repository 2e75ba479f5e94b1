"""Whole models through mlx-lm's own entry points: greedy tokens must be what they are without the detour."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map  # pyright: ignore[reportUnknownVariableType]
from mlx_lm.generate import (
    BatchGenerator,
    batch_generate,  # pyright: ignore[reportUnknownVariableType]
    generate_step,
    speculative_generate_step,
)
from mlx_lm.models.cache import LRUPromptCache

from ..dense import DenseStore
from ..factory import install, make_prompt_cache
from ..spec import Spec
from .driving import GEOMETRY, expect, fail
from .models import tiny_model

_DRAFTED = 3


def random_prompt(seed: int, length: int) -> list[int]:
    """Return tokens of the tiny models' vocabulary."""
    return [int(t) for t in mx.random.randint(0, 128, (length,), key=mx.random.key(seed)).tolist()]  # type: ignore[union-attr]


def greedy(model: Any, prompt: list[int], cache: list[Any], count: int) -> list[int]:
    """Return the next `count` tokens, the likeliest each time; `cache` has then seen them all."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def check_batch_generator(spec: str) -> None:
    """Sequences of a BatchGenerator that start and finish at different times get the tokens they get alone."""
    for name in ("llama", "gpt_oss"):
        model = tiny_model(name)
        prompts, limits = _batch()
        alone = [
            greedy(model, prompt, make_prompt_cache(model, spec), n) for prompt, n in zip(prompts, limits, strict=True)
        ]
        own_bytes = _own_bytes(name)
        with installed(model, spec):
            served = list(_serve(model, prompts, limits))
        for index, right in enumerate(alone):
            got = [token for tokens, _ in served for uid, token in tokens if uid == index]
            expect(got == right, spec, f"sequence {index} of a {name} batch: tokens {got}, alone {right}")
        held = max(held for _, held in served)
        limit = 0.9 * own_bytes if _compresses(spec) else 1.5 * own_bytes  # room for growth
        expect(held < limit, spec, f"a {name} batch held {held} bytes, mlx-lm's own caches {own_bytes}")


def check_batch_generate(spec: str) -> None:
    """mlx_lm.batch_generate gives every sequence its own tokens, stop token included."""
    model = tiny_model("qwen2")
    prompts = [random_prompt(seed, n) for seed, n in enumerate((90, 300, 20))]
    alone = [greedy(model, prompt, make_prompt_cache(model, spec), 25) for prompt in prompts]
    end = alone[0][9]
    tokenizer = SimpleNamespace(eos_token_ids={end}, decode=str)
    with installed(model, spec):
        answer = batch_generate(model, tokenizer, prompts, max_tokens=25, return_token_ids=True)
    for index, (got, right) in enumerate(zip(answer.token_ids or [], alone, strict=True)):
        right = right[: right.index(end)] if end in right else right
        expect(got == right, spec, f"sequence {index} of batch_generate: tokens {got}, alone {right}")


def check_speculation(spec: str) -> None:
    """Speculative decoding gives the tokens of a cache that never saw a rejected draft, or is refused without rollback.

    A store that compresses what has left its newest rows reads a little less of it compressed when tokens come in
    drafts; only without compression must the tokens also be plain greedy's.
    """
    model, draft = tiny_model("llama"), tiny_model("llama")
    draft.update(tree_map(_nudged, draft.parameters()))
    prompt, count = random_prompt(0, 200), 60
    cache = make_prompt_cache(model, spec)
    reach = cache[0].rollback
    drafted = _DRAFTED if reach is None else min(_DRAFTED, max(reach, 1))
    steps = speculative_generate_step(
        mx.array(prompt),
        model,
        draft,
        num_draft_tokens=drafted,
        max_tokens=count,
        prompt_cache=cache + make_prompt_cache(draft, spec),
    )
    if reach == 0:
        try:
            list(steps)
        except ValueError:
            return
        fail(spec, "speculative decoding needs a rollback and must be refused without one")
    answer = [(int(token), bool(from_draft)) for token, _, from_draft in steps]
    accepted = sum(from_draft for _, from_draft in answer)
    expect(0 < accepted < count - count // (drafted + 1), spec, f"{accepted} accepted drafts of {count} test nothing")

    never = make_prompt_cache(model, spec)
    model(mx.array([prompt[:-1]]), cache=never)
    chunk, round_ = prompt[-1:], list[int]()
    for token, from_draft in answer:
        round_.append(token)
        if not from_draft:
            logits = model(mx.array([chunk + round_[:-1]]), cache=never)
            right = mx.argmax(logits[0], axis=-1).tolist()
            expect(round_ == right, spec, f"speculative decoding gives {round_} without rejected drafts {right}")
            chunk, round_ = [token], []
    if not _compresses(spec):
        got = [token for token, _ in answer]
        right = greedy(model, prompt, make_prompt_cache(model, spec), count)
        expect(got == right, spec, f"speculative decoding gives {got}, plain greedy {right}")


def check_prefix_reuse(spec: str) -> None:
    """A prompt cache taken from LRUPromptCache answers as a fresh one that was fed the same calls."""
    model = tiny_model("llama")
    first, second = random_prompt(0, 180), random_prompt(1, 60)
    kept = LRUPromptCache()
    cache = make_prompt_cache(model, spec)
    answer = greedy(model, first, cache, 20)
    seen = first + answer
    kept.insert_cache("m", seen, cache)

    same_calls = make_prompt_cache(model, spec)
    greedy(model, first, same_calls, 20)
    right = greedy(model, second, same_calls, 20)
    for turn in range(2):  # the stored cache must be as good the second time
        reused, rest = cast("tuple[Any, list[int]]", kept.fetch_nearest_cache("m", seen + second))
        expect(rest == second, spec, "LRUPromptCache does not give the cache back")
        got = greedy(model, rest, reused, 20)
        expect(got == right, spec, f"reuse {turn + 1} of a stored cache gives {got}, a fresh cache {right}")

    # A prompt that leaves the stored one midway: the stored cache is cut back exactly, or not used.
    other = first[:100] + second
    reused, rest = cast("tuple[Any, list[int]]", kept.fetch_nearest_cache("m", other))
    if reused is None:
        expect(rest == other, spec, "without a cache all tokens must be processed")
        return
    expect(len(rest) == 60, spec, f"a cache cut back to 100 tokens leaves 60 to process, got {len(rest)}")
    expect(reused[0].offset == 100, spec, f"the cache cut back to 100 tokens has offset {reused[0].offset}")
    got, right = greedy(model, rest, reused, 20), greedy(model, other, make_prompt_cache(model, spec), 20)
    expect(got == right, spec, f"a cache that was cut back gives {got}, a fresh one {right}")


def check_depends(spec: str) -> None:
    """`cache.keys = mx.depends(cache.keys, x)`, as mlx-lm's pipelines write it, changes nothing."""
    model = tiny_model("llama")
    plain, tied = make_prompt_cache(model, spec), make_prompt_cache(model, spec)
    prompt = random_prompt(0, 150)
    for cache in (plain, tied):
        model(mx.array([prompt]), cache=cache)
    beside = mx.ones(4) * 3
    for layer in tied:
        layer.keys = mx.depends(layer.keys, beside)
    got, right = (greedy(model, [5], cache, 40) for cache in (tied, plain))
    expect(got == right, spec, f"setting keys to mx.depends(keys, x) gives {got}, leaving them {right}")


@contextmanager
def installed(model: Any, spec: str) -> Generator[None]:
    """Have mlx-lm use a method for a model while the block runs."""
    undo = install(model, spec)
    try:
        yield
    finally:
        undo()


def _nudged(weights: mx.array) -> mx.array:
    return weights + 0.01 * mx.random.normal(weights.shape, key=mx.random.key(1))


def _batch() -> tuple[list[list[int]], list[int]]:
    """Return prompts of very different length, and how many tokens are to follow each."""
    return [random_prompt(seed, n) for seed, n in enumerate((400, 7, 150, 1, 45))], [8, 24, 5, 18, 12]


@functools.cache
def _own_bytes(name: str) -> int:
    """Most bytes that mlx-lm's own caches hold for the batch."""
    return max(held for _, held in _serve(tiny_model(name), *_batch()))


def _serve(model: Any, prompts: list[list[int]], limits: list[int]) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Yield each step's (sequence, token) pairs and the bytes held; the last prompts join while others are answered."""
    generator = BatchGenerator(model)
    try:
        generator.insert(prompts[:2], limits[:2])
        waiting = list(zip(prompts, limits, strict=True))[2:]
        while responses := generator.next_generated():
            yield [(r.uid, r.token) for r in responses], generator.prompt_cache_nbytes
            if waiting:
                prompt, limit = waiting.pop(0)
                generator.insert([prompt], [limit])
    finally:
        generator.close()


def _compresses(spec: str) -> bool:
    policy, store = Spec.parse(spec).create(GEOMETRY)
    return policy.evicts or not isinstance(store, DenseStore)
