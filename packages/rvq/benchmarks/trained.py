"""Trained codebooks against untrained ones: fitted to one text, measured on another.

    python packages/rvq/benchmarks/trained.py results/trained-smollm2.json

Untrained ones are given at more bits too, up to where they hold as much as the trained ones with their codebooks, which
are of one size whatever the length of the text. Needs mlx-kv-cli.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

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
    parser.add_argument("--fit-tokens", type=int, default=2048)
    parser.add_argument("--report", default="typesseq", help="text to measure on")
    parser.add_argument("--tokens", type=int, default=5632)
    parser.add_argument("--prefill", type=int, default=5120)
    options = parser.parse_args()
    loaded = load_model(options.model)
    cache = make_prompt_cache(loaded.model, "dense")
    lm.feed(loaded.model, mx.array([loaded.tokenizer.encode(read_text(options.fit))[: options.fit_tokens]]), cache)
    rows = {i: layer.keys_and_values() for i, layer in enumerate(cache)}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "codebooks.safetensors")
        nbytes = TrainedRvq.fit(
            rows, fingerprint(loaded.model), file, on_progress=lambda i, n: print(f"fitted {i}/{n}", flush=True)
        )
        specs = {"trained_rvq": f"trained_rvq(codebooks={file!r})", **{spec: spec for spec in UNTRAINED}}
        factories = {name: lambda spec=spec: make_prompt_cache(loaded.model, spec) for name, spec in specs.items()}
        ids = loaded.tokenizer.encode(read_text(options.report))[: options.tokens]
        results = perplexities(
            loaded.model, ids, factories, options.prefill, on_progress=lambda i, n: print(f"{i}/{n}", flush=True)
        )
    results.pop(FULL)
    table = {name: asdict(result) for name, result in results.items()}
    for name, row in table.items():
        row["codebook_bytes"] = nbytes if name == "trained_rvq" else 0
        held, books = row["bytes_held"] / 1e6, row["codebook_bytes"] / 1e6
        print(f"{name:20} {held:8.2f} MB (codebooks {books:.2f}) {row['ratio']:7.4f}")
    report = {"environment": environment(), "dtype": loaded.dtype, **vars(options), "output": options.output.name}
    options.output.write_text(json.dumps({**report, "results": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
