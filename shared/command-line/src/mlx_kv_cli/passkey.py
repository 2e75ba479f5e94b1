"""Passkey retrieval: a number hidden at some depth of a long text, asked for at the end.

After arXiv 2305.16300, section 4.2. The prompt is plain text, for instruction-tuned models too, and ends where the key
must follow: success is an exact match. Perplexity can stay good while this fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from random import Random
from typing import Literal, cast, get_args

import mlx.core as mx

from mlx_kv_cli import lm
from mlx_kv_cli.texts import documentation
from mlx_kv_cli.together import Lockstep

Filler = Literal["repeated", "documentation"]
FILLERS: tuple[Filler, ...] = get_args(Filler)

TASK = "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it.\n\n"
NEEDLE = "\nThe pass key is {key}. Remember it. The pass key is {key}.\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class PasskeyCell:
    """Successes among `trials` at one length (prompt tokens) and depth (0 start, 1 end)."""

    length: int
    depth: float
    successes: int
    trials: int


@dataclass(frozen=True)
class PasskeyResult:
    """One cache on one filler: a cell for every length and depth."""

    filler: Filler
    cells: tuple[PasskeyCell, ...]

    @property
    def successes(self) -> int:
        """Over all cells."""
        return sum(cell.successes for cell in self.cells)

    @property
    def trials(self) -> int:
        """Over all cells."""
        return sum(cell.trials for cell in self.cells)


def passkeys(
    model: lm.Model,
    tokenizer: lm.Tokenizer,
    factories: Mapping[str, lm.CacheFactory],
    *,
    filler: Filler = "repeated",
    lengths: Sequence[int] = (1440,),
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    seeds: Iterable[int] = range(4),
    prefill_step_size: int = 2048,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, PasskeyResult]:
    """Hide and ask for a five-digit key, once per length, depth and seed, each time through fresh caches.

    The key, and where in the documentation the filler begins, follow from length, depth and seed: every cache gets the
    same prompts. All caches of a prompt are held at a time.

    Raises ValueError for an unknown filler, a depth outside 0 to 1, or a length with no room for filler.
    """
    seeds = tuple(seeds)
    cells: dict[str, list[PasskeyCell]] = {name: [] for name in factories}
    places = list(product(lengths, depths))
    for number, (length, depth) in enumerate(places):
        found: list[list[bool]] = []
        for seed in seeds:
            prompt, key = make_prompt(tokenizer, length, depth, seed, filler)
            lockstep = Lockstep(model, [factory() for factory in factories.values()])
            found.append(_recalls(lockstep, tokenizer, prompt, key, prefill_step_size))
            on_progress(number * len(seeds) + len(found), len(places) * len(seeds))
        for i, name in enumerate(factories):
            cells[name].append(PasskeyCell(length, depth, sum(each[i] for each in found), len(seeds)))
    return {name: PasskeyResult(filler, tuple(of_cache)) for name, of_cache in cells.items()}


def make_prompt(tokenizer: lm.Tokenizer, length: int, depth: float, seed: int, filler: Filler) -> tuple[list[int], str]:
    """A prompt of exactly `length` tokens, and the key hidden in it after the share `depth` of the filler."""
    if filler not in FILLERS:
        raise ValueError(f"[passkey] expected a filler of {', '.join(FILLERS)}, got {filler!r}")
    if not 0 <= depth <= 1:
        raise ValueError(f"[passkey] expected a depth between 0 and 1, got {depth}")
    random = Random(f"{length} {depth} {seed}")
    key = str(random.randint(10000, 99999))
    before, after = tokenizer.encode(TASK), _encode(tokenizer, QUESTION)
    needle = _encode(tokenizer, NEEDLE.format(key=key))
    room = length - len(before) - len(needle) - len(after)
    if room < 1:
        raise ValueError(f"[passkey] expected a length of at least {length - room + 1} tokens, got {length}")
    text = _filler(tokenizer, room, random, filler)
    split = round(depth * room)
    return [*before, *text[:split], *needle, *text[split:], *after], key


def _filler(tokenizer: lm.Tokenizer, room: int, random: Random, filler: Filler) -> list[int]:
    """Exactly `room` tokens of filler; the documentation starts anywhere and goes round at its end."""
    tokens = _endless(tokenizer, filler)
    start = 0 if filler == "repeated" else random.randrange(len(tokens))
    repeats = (start + room) // len(tokens) + 1
    return (tokens * repeats)[start : start + room]


def _recalls(
    lockstep: Lockstep, tokenizer: lm.Tokenizer, prompt: list[int], key: str, prefill_step_size: int
) -> list[bool]:
    """Whether each cache's likeliest continuation of the prompt begins with the key."""
    for start in range(0, len(prompt) - 1, prefill_step_size):
        lockstep.feed(mx.array([prompt[start : min(start + prefill_step_size, len(prompt) - 1)]]))
    answers = mx.array([prompt[-1:]] * len(lockstep.caches))
    for _ in range(len(_encode(tokenizer, f" {key}")) + 1):
        likeliest = [mx.argmax(logits[-1]) for logits in lockstep.logits(answers[:, -1:])]
        answers = mx.concatenate([answers, mx.stack(likeliest)[:, None]], axis=1)
    texts = [tokenizer.decode(tokens) for tokens in cast("list[list[int]]", answers[:, 1:].tolist())]
    return [text.strip().startswith(key) for text in texts]


def _encode(tokenizer: lm.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@lru_cache(maxsize=4)
def _endless(tokenizer: lm.Tokenizer, filler: Filler) -> list[int]:
    """The tokens to repeat; paragraph by paragraph, since tokenizers warn about texts beyond the model's context."""
    pieces = [REPEATED] if filler == "repeated" else documentation()
    return [token for piece in pieces for token in _encode(tokenizer, piece)]
