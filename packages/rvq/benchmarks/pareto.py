"""Bytes held against perplexity on real text: RVQ, KIVI and mlx-lm's quantised cache.

    python packages/rvq/benchmarks/pareto.py results/pareto-smollm2.json

Every candidate is measured on one text; those of each family that no other of it beats on both counts there are then
measured on another text, which is what the table reports. The protocol is that of `mlx_kv perplexity`. Needs mlx-kv-cli
and mlx-kv-kivi. mlx-lm's rows are read back dense: its quantised attention takes minutes on a CPU, for the same numbers
up to rounding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_kv_cli.blas import load_openblas

load_openblas()

import mlx.core as mx  # noqa: E402 (OpenBLAS comes first)
from mlx_lm.models.cache import QuantizedKVCache  # noqa: E402

from mlx_kv import make_prompt_cache  # noqa: E402
from mlx_kv_cli.models import LoadedModel, load_model  # noqa: E402
from mlx_kv_cli.perplexity import FULL, PerplexityResult, perplexities  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402
from mlx_kv_cli.texts import read_text  # noqa: E402

CANDIDATES = {
    "rvq": [
        "rvq",
        "rvq(residual=32)",
        "rvq(residual=0)",
        "rvq(unbiased=False)",
        "rvq(key_bits=1, value_bits=1, residual=0, center=False, unbiased=True)",
        "rvq(residual=0, center=False, unbiased=True)",
        "rvq(key_bits=2, value_bits=1, residual=32)",
        "rvq(key_bits=1, value_bits=1, residual=0, center=False)",
        "rvq(key_bits=2, value_bits=1, residual=0, center=False)",
        "rvq(residual=0, center=False)",
        "rvq(key_bits=3, residual=32)",
        "rvq(key_bits=3, value_bits=3, residual=32)",
        "rvq(key_bits=4, value_bits=3, residual=32)",
        "rvq(key_bits=4, value_bits=4, residual=32)",
        "rvq(key_bits=2, value_bits=2, stages=2, residual=32)",
        "rvq(key_bits=3, value_bits=2, stages=2, residual=32)",
        "rvq(key_bits=4, value_bits=4, residual=32, center=False)",
        "rvq(key_bits=3, value_bits=2, stages=2, residual=32, center=False)",
        "rvq(key_bits=3, value_bits=3, stages=2, residual=0, center=False)",
        "rvq(key_bits=3, value_bits=3, stages=2, residual=32, center=False)",
    ],
    "kivi": [
        "kivi(bits=2)",
        "kivi(bits=2, residual=32)",
        "kivi(bits=3, residual=32)",
        "kivi(bits=4, residual=32)",
    ],
    "mlx-lm": ["mlx-lm 2 bit", "mlx-lm 3 bit", "mlx-lm 4 bit", "mlx-lm 6 bit"],
}
QUICK = {"rvq": ["rvq", "rvq(key_bits=3)"], "kivi": ["kivi(bits=2)"], "mlx-lm": ["mlx-lm 4 bit"]}
GROUP_SIZE = 64  # mlx-lm's default


class MlxLmCache:
    """mlx-lm's quantised cache, read back dense."""

    def __init__(self, bits: int) -> None:
        self.own = QuantizedKVCache(group_size=GROUP_SIZE, bits=bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        packed = self.own.update_and_fetch(keys, values)
        return tuple(mx.dequantize(*rows, group_size=GROUP_SIZE, bits=self.own.bits) for rows in packed)

    def __getattr__(self, name: str) -> Any:
        if name == "bits":  # mlx-lm would take its quantised attention
            raise AttributeError(name)
        return getattr(self.own, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--choose", default="specialnames", help="text to choose on: a file or a topic of pydoc_data")
    parser.add_argument("--report", default="typesseq", help="text to report on")
    parser.add_argument("--choose-tokens", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1536, help="of the text to report on")
    parser.add_argument(
        "--prefill", type=int, default=512, help="tokens given as the prompt, half of the text to choose on at most"
    )
    parser.add_argument("--quick", action="store_true", help="few candidates and tokens, to see that it runs")
    options = parser.parse_args()
    candidates = QUICK if options.quick else CANDIDATES
    if options.quick:
        options.choose_tokens = options.tokens = 400
        options.prefill = 300
    loaded = load_model(options.model)
    report: dict[str, Any] = {"environment": environment(), "dtype": loaded.dtype, **vars(options)}
    report["output"] = options.output.name
    prefill = min(options.prefill, options.choose_tokens // 2)
    everything = [name for names in candidates.values() for name in names]
    report["chosen on"] = measured(loaded, options.choose, options.choose_tokens, prefill, everything)
    best = {family: frontier(names, report["chosen on"]) for family, names in candidates.items()}
    report["frontier"] = best
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    names = [name for names in best.values() for name in names]
    report["reported on"] = measured(loaded, options.report, options.tokens, options.prefill, names)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    for name in names:
        result = report["reported on"][name]
        held, ratio, kl = result["bytes_held"] / 1e6, result["ratio"], result["kl_divergence"]
        print(f"{name:70} {held:8.2f} MB  {ratio:7.4f}  KL {kl:.4f}")


def measured(loaded: LoadedModel, text: str, tokens: int, prefill: int, names: Sequence[str]) -> dict[str, Any]:
    ids = loaded.tokenizer.encode(read_text(text))[:tokens]
    factories = {name: factory(loaded, name) for name in names}
    results: dict[str, PerplexityResult] = perplexities(
        loaded.model,
        ids,
        factories,
        prefill,
        on_progress=lambda done, total: print(f"{text}: {done}/{total}", flush=True),
    )
    results.pop(FULL)
    return {name: asdict(result) for name, result in results.items()}


def factory(loaded: LoadedModel, name: str) -> Callable[[], list[Any]]:
    if name.startswith("mlx-lm"):
        return lambda: [MlxLmCache(int(name.split()[1])) for _ in loaded.model.layers]
    return lambda: make_prompt_cache(loaded.model, name)


def frontier(names: Sequence[str], results: dict[str, Any]) -> list[str]:
    """Those that no other of the family beats in bytes and perplexity both."""

    def beaten(name: str) -> bool:
        own = results[name]
        return any(
            other["bytes_held"] <= own["bytes_held"] and other["ratio"] < own["ratio"]
            for other in (results[n] for n in names)
        )

    return [name for name in names if not beaten(name)]


if __name__ == "__main__":
    main()
