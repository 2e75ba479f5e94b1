"""Passkey retrieval at 256 of 1,440 rows: every policy, the full cache, and rows kept without the queries.

    python passkey.py [--output FILE] [--seeds 4]

SmolLM2-135M-Instruct, five depths, both fillers, greedy. No policy drops a row before a prompt's last token, so one
prefill serves all of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from copy import deepcopy
from itertools import product
from pathlib import Path

from mlx_kv_cli.blas import load_openblas

load_openblas()

import mlx_kv  # noqa: E402
from mlx_kv.policy import Policy  # noqa: E402
from mlx_kv.spec import Spec  # noqa: E402
from mlx_kv.testing.baselines import LastRows, RandomRows  # noqa: E402
from mlx_kv.window import WindowOptions  # noqa: E402
from mlx_kv_cli import lm  # noqa: E402
from mlx_kv_cli.models import load_model  # noqa: E402
from mlx_kv_cli.passkey import FILLERS, make_prompt  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402

LENGTH, DEPTHS, BUDGET = 1440, (0.1, 0.3, 0.5, 0.7, 0.9), 256
SPECS = {
    "full": "keep_all",
    "snapkv W 8": f"snapkv(budget={BUDGET}, window=8)",
    "snapkv W 32": f"snapkv(budget={BUDGET})",
    "snapkv W 32 avg 5": f"snapkv(budget={BUDGET}, kernel_size=5, pooling='avg')",
    "pyramidkv W 8": f"pyramidkv(budget={BUDGET})",
    "pyramidkv W 8, beta 5": f"pyramidkv(budget={BUDGET}, beta=5)",
    "h2o": f"h2o(heavy={BUDGET // 2}, recent={BUDGET // 2})",
    "keyformer": f"keyformer(budget={BUDGET})",
}


class Together(Policy):
    """Shows every chunk to several policies."""

    def __init__(self, policies):
        self.policies = policies

    def observe(self, chunk):
        return any([policy.observe(chunk) for policy in self.policies.values()])

    def arrays(self):
        held = {name: policy.arrays() for name, policy in self.policies.items()}
        return {f"{name} {part}": array for name, arrays in held.items() for part, array in arrays.items()}


def policies(geometry):
    """Fresh policies of one layer, by the names of the table."""
    plain = WindowOptions(budget=BUDGET, window=8)
    made = {name: Spec.parse(spec).policy.create(geometry) for name, spec in SPECS.items()}
    return {**made, "random rows": RandomRows(plain, geometry.layer), "last rows": LastRows(plain)}


def prefilled(model, prompt):
    """A cache that has seen all of the prompt but its last token, and so have all policies."""
    cache = mlx_kv.make_prompt_cache(model, "dense")
    for layer in cache:
        layer.policy = Together(policies(mlx_kv.Geometry(**layer.origin["geometry"])))
    lm.feed(model, lm.mx.array([prompt[:-1]]), cache)
    return cache


def under(shared, name):
    """A copy of the cache that goes on under one of its policies."""
    cache = deepcopy(shared)
    for layer in cache:
        layer.policy = layer.policy.policies[name]
    return cache


def recalls(loaded, last_token, cache, key):
    budget = len(loaded.tokenizer.encode(f" {key}", add_special_tokens=False)) + 1
    pieces = lm.stream(loaded.model, loaded.tokenizer, [last_token], cache, max_tokens=budget, sampling=lm.Sampling())
    return "".join(piece.text for piece in pieces).strip().startswith(key)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--seeds", type=int, default=4, help="keys per depth and filler")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    loaded = load_model("smollm2")
    table = {}
    start = time.time()
    for filler, depth, seed in product(FILLERS, DEPTHS, range(arguments.seeds)):
        prompt, key = make_prompt(loaded.tokenizer, LENGTH, depth, seed, filler)
        cache = prefilled(loaded.model, prompt)
        for name in cache[0].policy.policies:
            found = recalls(loaded, prompt[-1], under(cache, name), key)
            table.setdefault(name, {}).setdefault(filler, []).append({"depth": depth, "seed": seed, "found": found})
        done = len(table["full"][filler])
        print(
            f"{time.time() - start:6.0f} s {filler} {done}",
            {n: sum(x["found"] for x in t[filler]) for n, t in table.items()},
            flush=True,
        )
    if arguments.output:
        result = {
            "environment": environment(),
            "commit": commit,
            "length": LENGTH,
            "budget": BUDGET,
            "specs": SPECS,
            "table": table,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
