"""Trained codebooks against untrained ones: fitted to one text, measured on another.

    python packages/rvq/benchmarks/trained.py results/trained-smollm2.json

The last 512 tokens are scored, of a short text and of a long one. Untrained codebooks are given at more bits too, up to
where they hold as much as the trained ones, which are of one size whatever the length of the text. Needs mlx-kv-cli.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_kv_cli.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402 (OpenBLAS comes first)

from mlx_kv import make_prompt_cache  # noqa: E402
from mlx_kv.identity import fingerprint  # noqa: E402
from mlx_kv_cli import lm  # noqa: E402
from mlx_kv_cli.models import load_model  # noqa: E402
from mlx_kv_cli.perplexity import FULL, perplexities  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402
from mlx_kv_cli.texts import read_text  # noqa: E402
from mlx_kv_rvq import TrainedRvq  # noqa: E402

SCORED = 512
UNTRAINED = [
    "rvq",
    "rvq(center=False)",
    "rvq(key_bits=3)",
    "rvq(key_bits=3, value_bits=3)",
    "rvq(key_bits=4, value_bits=3)",
    "rvq(key_bits=4, value_bits=4)",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--fit", default="specialnames", help="text to fit to: a file or a topic of pydoc_data")
    parser.add_argument("--fit-tokens", type=int, default=6144)
    parser.add_argument("--fit-rows", type=int, default=2048, help="rows to fit to, spread evenly over these tokens")
    parser.add_argument("--report", default="typesseq", help="text to measure on")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 5632])
    options = parser.parse_args()
    loaded = load_model(options.model)
    cache = make_prompt_cache(loaded.model, "dense")
    lm.feed(loaded.model, mx.array([loaded.tokenizer.encode(read_text(options.fit))[: options.fit_tokens]]), cache)
    every = max(options.fit_tokens // options.fit_rows, 1)
    rows = {i: tuple(side[:, :, ::every] for side in layer.keys_and_values()) for i, layer in enumerate(cache)}
    report = {"environment": environment(), "dtype": loaded.dtype, **vars(options), "output": options.output.name}
    report["results"] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "codebooks.safetensors")
        nbytes = TrainedRvq.fit(
            rows, fingerprint(loaded.model), file, on_progress=lambda i, n: print(f"fitted {i}/{n}", flush=True)
        )
        specs = {"trained_rvq": f"trained_rvq(codebooks={file!r})", **{spec: spec for spec in UNTRAINED}}
        factories = {name: lambda spec=spec: make_prompt_cache(loaded.model, spec) for name, spec in specs.items()}
        ids = loaded.tokenizer.encode(read_text(options.report))
        for tokens in options.tokens:
            report["results"][tokens] = table = measured(loaded.model, ids[:tokens], factories, nbytes)
            for name, row in table.items():
                held, books = row["bytes_held"] / 1e6, row["codebook_bytes"] / 1e6
                print(f"{tokens} {name:32} {held:8.2f} MB (codebooks {books:.2f}) {row['ratio']:7.4f}", flush=True)
            options.output.write_text(json.dumps(report, indent=1) + "\n")


def measured(model: lm.Model, ids: list[int], factories: dict[str, lm.CacheFactory], nbytes: int) -> dict[str, Any]:
    results = perplexities(
        model, ids, factories, len(ids) - SCORED, on_progress=lambda i, n: print(f"{i}/{n}", flush=True)
    )
    results.pop(FULL)
    codebooks = {"trained_rvq": nbytes}
    return {name: {**asdict(result), "codebook_bytes": codebooks.get(name, 0)} for name, result in results.items()}


if __name__ == "__main__":
    main()
