"""Decode attention over KIVI rows beside MLX's own over bfloat16 and mlx-lm's over its quantised cache.

    python decode.py [--output FILE] [--rows 4096 ...] [--quick]

Every case's error against the reference in float32 stands beside its times. Times are medians over rounds in which the
contestants take turns, of back-to-back calls whose inputs rotate, in microseconds a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_kv_fused_attention import attend, reference
from mlx_kv_kernels import resolve_backend
from mlx_kv_kivi import Kivi, KiviStore

COPIES = 3  # of the inputs, so that no cache serves the next call


@dataclass(frozen=True)
class Case:
    rows: int
    bits: int = 2
    group: int = 4
    head_dim: int = 128
    kv_heads: int = 8
    group_size: int = 64


def cases(rows):
    for n in rows:
        yield Case(n)
        yield Case(n, bits=4)
    for n in (r for r in rows if r >= 65536):
        yield Case(n, group=1)
        yield Case(n, group=8)
        yield Case(n, head_dim=64)
        yield Case(n, head_dim=256, kv_heads=4)
        yield Case(n, group_size=32)


def filled_store(case, seed):
    """A store of random rows, its newest appended on its own as in decoding."""
    config = Kivi(bits=case.bits, group_size=case.group_size)
    store = KiviStore(config)
    shape = (1, case.kv_heads, case.rows, case.head_dim)
    keys, values = (mx.random.normal(shape, dtype=mx.bfloat16, key=mx.random.key(seed + i)) for i in range(2))
    for first in range(0, case.rows - 1, 16384):
        last = min(first + 16384, case.rows - 1)
        store.append(keys[:, :, first:last], values[:, :, first:last])
        store.settle()
        mx.eval(list(store.arrays().values()))
    store.append(keys[:, :, -1:], values[:, :, -1:])
    mx.eval(list(store.arrays().values()))
    return store, keys, values


def back_to_back(call, calls=24):
    mx.synchronize()
    begin = time.perf_counter()
    for i in range(calls):
        mx.async_eval(call(i))
    mx.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def single(call, calls=15):
    times = []
    for i in range(calls):
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval(call(i))
        mx.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(case, rounds):
    scale, heads = case.head_dim**-0.5, case.group * case.kv_heads
    made = [filled_store(case, 10 * i) for i in range(COPIES)]
    queries = [
        mx.random.normal((1, heads, 1, case.head_dim), dtype=mx.bfloat16, key=mx.random.key(7 + i))
        for i in range(COPIES)
    ]
    layouts = [store.layout() for store, _, _ in made]
    quantize = partial(mx.quantize, group_size=64, bits=case.bits)
    quantized = [(quantize(keys), quantize(values)) for _, keys, values in made]
    mx.eval(queries, quantized)
    backend = resolve_backend()  # once, as the environment is slow to ask

    def fused(i):
        return attend(queries[i % COPIES], layouts[i % COPIES], scale, backend=backend)

    def bfloat16(i):
        _, keys, values = made[i % COPIES]
        return mx.fast.scaled_dot_product_attention(queries[i % COPIES], keys, values, scale=scale)

    def mlx_lm(i):
        keys, values = quantized[i % COPIES]
        return quantized_scaled_dot_product_attention(
            queries[i % COPIES], keys, values, scale=scale, mask=None, group_size=64, bits=case.bits
        )

    def step(i):  # with the host's share of a decode step: the layout is described anew
        store = made[i % COPIES][0]
        return attend(queries[i % COPIES], store.layout(), scale, backend=backend)

    truth, _, _ = reference.attend(queries[0].astype(mx.float32), *made[0][0].dense(), [case.rows], scale)
    error = (mx.linalg.norm(fused(0).astype(mx.float32) - truth) / mx.linalg.norm(truth)).item()
    contestants = {"fused": fused, "bfloat16": bfloat16, "step": step}
    refused = None  # MLX's CUDA backend has no quantised product for some shapes
    try:
        mx.eval(mlx_lm(0))
        contestants["mlx_lm"] = mlx_lm
    except RuntimeError as refusal:
        refused = str(refusal)
    times = {name: [] for name in contestants}
    for call in contestants.values():
        back_to_back(call, 6)
    for _ in range(rounds):
        for name, call in contestants.items():
            times[name].append(back_to_back(call, 6 if name == "mlx_lm" else 24))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    spread = {name: [min(taken), max(taken)] for name, taken in times.items()}
    nbytes = made[0][0].nbytes
    return {
        **case.__dict__,
        "microseconds": medians,
        "spread": spread,
        "single_call": {"fused": single(fused), "bfloat16": single(bfloat16)},
        "ratio": medians["fused"] / medians["bfloat16"],
        "times_faster_than_mlx_lm": medians["mlx_lm"] / medians["fused"] if refused is None else None,
        "mlx_lm_refused": refused,
        "bytes_held": nbytes,
        "gigabytes_per_second": nbytes / medians["fused"] / 1e3,
        "relative_error": error,
        "bfloat16_bytes": 2 * made[0][1].nbytes,
    }


def copy_bandwidth():
    """Gigabytes a second, read plus written, of a copy far larger than any cache."""
    arrays = [mx.random.normal((1 << 28,), dtype=mx.float32, key=mx.random.key(i)) for i in range(2)]
    mx.eval(arrays)
    taken = [back_to_back(lambda i: arrays[i % 2] + 1, 8) for _ in range(5)]
    return 2 * arrays[0].nbytes / statistics.median(taken) / 1e3


def machine(commit):
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "device": str(mx.device_info().get("device_name")),
        "backend": resolve_backend(),
        "mlx": mx.__version__,
        "mlx_lm": version("mlx-lm"),
        "commit": commit,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384, 65536, 262144])
    parser.add_argument("--quick", action="store_true", help="only groups of 4 and head dim 128")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", help="default: what git says")
    arguments = parser.parse_args()
    os.environ["MLX_ENABLE_TF32"] = "0"  # the reference's float32 products are to be float32's on CUDA too
    bandwidth = copy_bandwidth()
    results = {**machine(arguments.commit), "copy_gigabytes_per_second": bandwidth, "cases": []}
    print(f"{results['device']}, copy {bandwidth:.0f} GB/s")
    for case in cases(arguments.rows):
        if arguments.quick and (case.group, case.head_dim, case.group_size) != (4, 128, 64):
            continue
        result = measure(case, arguments.rounds)
        results["cases"].append(result)
        times = result["microseconds"]
        print(
            f"{case}: fused {times['fused']:.1f} (step {times['step']:.1f}) bf16 {times['bfloat16']:.1f} "
            f"mlx-lm {times.get('mlx_lm', float('nan')):.0f} us, ratio {result['ratio']:.2f}, "
            f"{result['gigabytes_per_second']:.0f} GB/s, error {result['relative_error']:.1e}",
            flush=True,
        )
        mx.clear_cache()
        if arguments.output:  # after every case, so that a run that is cut short is not lost
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
