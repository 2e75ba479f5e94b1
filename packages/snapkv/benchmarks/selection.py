"""Times SnapKV's selection and compaction beside the reference in MLX ops, and beside one layer's prefill attention.

    python packages/snapkv/benchmarks/selection.py results.json

32 query heads and 8 KV heads of 128 channels in bfloat16, a window of 32 and a budget of 1,024 rows (half of the
prompt where that is less). Before timing, the rows kept must be the reference's, except where the reference's scores at
the cut are nearer than float32 can tell. Inputs are random and rotated, so that no cache holds them. `stream` is the
time of a call among many that follow each other, `single` that of one call that is waited for; both are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kv_kernels import gather_rows, resolve_backend
from mlx_kv_snapkv import reference, select

QUERY_HEADS, KV_HEADS, DIM, WINDOW, BUDGET, KERNEL_SIZE, POOLING = 32, 8, 128, 32, 1024, 7, "max"
NEAR = 1e-4  # relative distance of scores that float32 sums in another order may exchange
Inputs = tuple[mx.array, mx.array, mx.array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192, 32768], help="rows of the prompts")
    parser.add_argument("--backend", default="auto", help="default auto")
    parser.add_argument("--commit", default=None, help="default: what git says")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of which the median is taken")
    options = parser.parse_args()
    backend = resolve_backend(options.backend)
    report: dict[str, Any] = {"about": about(options.commit), "backend": backend, "dtype": "bfloat16"}
    report["shape"] = {"query_heads": QUERY_HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "window": WINDOW}
    report["cases"] = []
    for rows in options.rows:
        report["cases"].append(measure(rows, backend, options.rounds))
        print(line(report["cases"][-1]), flush=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


def about(commit: str | None) -> dict[str, Any]:
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "device": {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)},
        "system": platform.platform(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-kv-snapkv": version("mlx-kv-snapkv"),
        "commit": commit,
    }


def measure(rows: int, backend: str, rounds: int) -> dict[str, Any]:
    budget = min(BUDGET, rows // 2)
    rotated = [random_inputs(rows, seed) for seed in range(4)]
    prompt = [mx.random.normal((1, QUERY_HEADS, rows, DIM), key=mx.random.key(99)).astype(mx.bfloat16)]
    mx.eval(rotated, prompt)

    def kernels(inputs: Inputs) -> list[mx.array]:
        queries, keys, values = inputs
        kept = select(queries, keys, budget, WINDOW, KERNEL_SIZE, POOLING, backend=backend)
        return [gather_rows(keys, kept, backend=backend), gather_rows(values, kept, backend=backend)]

    def plain(inputs: Inputs) -> list[mx.array]:
        queries, keys, values = inputs
        kept = reference.select(queries, keys, budget, WINDOW, KERNEL_SIZE, POOLING)[..., None]
        return [mx.take_along_axis(keys, kept, axis=2), mx.take_along_axis(values, kept, axis=2)]

    def attention(inputs: Inputs) -> list[mx.array]:
        _, keys, values = inputs
        return [mx.fast.scaled_dot_product_attention(prompt[0], keys, values, scale=DIM**-0.5, mask="causal")]

    exchanged = max(compare(*inputs[:2], budget, backend) for inputs in rotated)
    times: dict[str, dict[str, float]] = {}
    for name, op in (("kernels", kernels), ("reference", plain), ("prefill_attention", attention)):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(op(rotated[0]))
        times[name] = {
            "peak_bytes": mx.get_peak_memory() - before,
            "stream_us": 1e6 * stream(op, rotated, rounds),
            "single_us": 1e6 * single(op, rotated, rounds),
        }
    return {
        "rows": rows,
        "budget": budget,
        "rows_exchanged": exchanged,
        **times,
        "times_reference": times["reference"]["stream_us"] / times["kernels"]["stream_us"],
        "share_of_prefill_attention": times["kernels"]["stream_us"] / times["prefill_attention"]["stream_us"],
    }


def compare(queries: mx.array, keys: mx.array, budget: int, backend: str) -> int:
    """Rows kept that the reference does not keep; raises where scores are not near enough to explain them."""
    kept = select(queries, keys, budget, WINDOW, KERNEL_SIZE, POOLING, backend=backend)
    expected = reference.select(queries, keys, budget, WINDOW, KERNEL_SIZE, POOLING)
    scores = reference.pool(reference.votes(queries, keys, WINDOW), KERNEL_SIZE, POOLING)
    exchanged = 0
    for head in range(KV_HEADS):
        ours, theirs = set(kept[0, head].tolist()), set(expected[0, head].tolist())
        exchanged += len(ours - theirs)
        values = [scores[0, head, row].item() for row in ours ^ theirs]
        if values and max(values) - min(values) > NEAR * max(values):
            raise SystemExit(f"{keys.shape[2]} rows, head {head}: the rows kept are not the reference's")
    return exchanged


def stream(op: Callable[[Inputs], Any], inputs: Sequence[Inputs], rounds: int) -> float:
    """Seconds a call, when calls follow each other."""

    def once() -> float:
        calls = [*inputs] * 3  # so many that the first one's way through the host weighs little
        begin = time.perf_counter()
        for x in calls:
            mx.async_eval(op(x))
        mx.synchronize()
        return (time.perf_counter() - begin) / len(calls)

    return median(once, rounds)


def single(op: Callable[[Inputs], Any], inputs: Sequence[Inputs], rounds: int) -> float:
    """Seconds of a call that is waited for."""
    calls = iter(range(1 << 30))

    def once() -> float:
        x = inputs[next(calls) % len(inputs)]
        begin = time.perf_counter()
        mx.eval(op(x))
        mx.synchronize()
        return time.perf_counter() - begin

    return median(once, 2 * rounds)


def median(once: Callable[[], float], rounds: int) -> float:
    for _ in range(3):
        once()
    return statistics.median(once() for _ in range(rounds))


def random_inputs(rows: int, seed: int) -> Inputs:
    shapes = ((QUERY_HEADS, WINDOW), (KV_HEADS, rows), (KV_HEADS, rows))
    keys = mx.random.split(mx.random.key(seed), 3)
    q, k, v = (
        mx.random.normal((1, heads, count, DIM), key=key).astype(mx.bfloat16)
        for (heads, count), key in zip(shapes, keys, strict=True)
    )
    return q, k, v


def line(case: dict[str, Any]) -> str:
    kernels, plain = case["kernels"], case["reference"]
    return (
        f"{case['rows']:6} rows: kernels {kernels['stream_us']:8.1f} us (single {kernels['single_us']:.1f}), reference "
        f"{plain['stream_us']:8.1f} us (single {plain['single_us']:8.1f}), x{case['times_reference']:.1f}; "
        f"{case['share_of_prefill_attention']:.1%} of prefill attention; peak {kernels['peak_bytes'] >> 10} KiB, "
        f"reference {plain['peak_bytes'] >> 10} KiB; {case['rows_exchanged']} rows exchanged"
    )


if __name__ == "__main__":
    main()
