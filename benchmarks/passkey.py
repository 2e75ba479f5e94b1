"""Passkey retrieval in 1,440 tokens: every method, the full cache, and rows kept without the queries.

    python passkey.py [--output FILE] [--seeds 4]

SmolLM2-135M-Instruct in float32, five depths, both fillers, greedy. `mlx_kv evaluate passkey --json` writes the same
kind of file for the methods that are named to it; what it cannot name are the baselines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path

from mlx_kv_cli.blas import load_openblas

load_openblas()

import mlx_kv  # noqa: E402 (OpenBLAS comes first)
from mlx_kv import DenseStore  # noqa: E402
from mlx_kv.testing.baselines import LastRows, RandomRows  # noqa: E402
from mlx_kv.window import WindowOptions  # noqa: E402
from mlx_kv_cli import lm  # noqa: E402
from mlx_kv_cli.models import load_model  # noqa: E402
from mlx_kv_cli.passkey import FILLERS, passkeys  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402

BUDGET = 256
SPECS = [
    "kivi(bits=2)",
    "kivi(bits=2, group_size=64)",
    "rvq",
    "dense",
    f"snapkv(budget={BUDGET}, window=8)",
    f"snapkv(budget={BUDGET})",
    f"snapkv(budget={BUDGET}, kernel_size=5, pooling='avg')",
    f"pyramidkv(budget={BUDGET})",
    f"pyramidkv(budget={BUDGET}, beta=5)",
    f"h2o(heavy={BUDGET // 2}, recent={BUDGET // 2})",
    f"keyformer(budget={BUDGET})",
    f"snapkv(budget={BUDGET}, window=8)+kivi(bits=4)",
    f"pyramidkv(budget={BUDGET})+rvq",
    f"h2o(heavy={BUDGET // 2}, recent={BUDGET // 2})+rvq(center=False)",
]


def factories(model):
    """What makes each cache of the table, by name."""
    plain = WindowOptions(budget=BUDGET, window=8)

    def baseline(make):
        return lambda: [mlx_kv.CompressedKVCache(make(layer), DenseStore()) for layer, _ in enumerate(model.layers)]

    named = {spec: lambda spec=spec: mlx_kv.make_prompt_cache(model, spec) for spec in SPECS}
    full = {"full": lambda: lm.full_cache(model)}
    random = baseline(lambda layer: RandomRows(plain, seed=layer))
    return {**full, **named, "random rows": random, "last rows": baseline(lambda layer: LastRows(plain))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--seeds", type=int, default=4, help="keys per depth and filler")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    loaded = load_model("smollm2")
    results = []
    for filler in FILLERS:
        found = passkeys(
            loaded.model,
            loaded.tokenizer,
            factories(loaded.model),
            filler=filler,
            seeds=range(arguments.seeds),
            on_progress=lambda done, total, filler=filler: print(f"{filler}: {done} of {total}", flush=True),
        )
        for name, result in found.items():
            print(f"{name:60} {result.successes} of {result.trials}", flush=True)
            counts = {"successes": result.successes, "trials": result.trials}
            results.append({"method": name, **asdict(result), **counts})
    if arguments.output:
        facts = {"model": "smollm2", "dtype": loaded.dtype, "seeds": arguments.seeds, "results": results}
        facts |= {"environment": environment(), "commit": commit}
        arguments.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
