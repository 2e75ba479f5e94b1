"""Times RVQ's kernels against a copy and against the reference in MLX ops, after comparing their results.

    python packages/rvq/benchmarks/encode.py results.json

Rows [1, 8, rows, 128] in bfloat16 are random and taken in turns, so that no cache holds them. Times are medians of
calls that follow each other, kernel and reference both as a store calls them. Bandwidths count bytes read plus bytes
written, beside those of a copy in the same run. A decode step over encoded rows (mlx-kv-fused-attention) is timed
beside MLX's own attention over bfloat16 rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kv_fused_attention import attend
from mlx_kv_kernels import resolve_backend
from mlx_kv_rvq import Encoded, Rvq, RvqStore, decode, encode

HEADS, QUERY_HEADS, DIM, COPIES = 8, 32, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--rows", type=int, default=32768, help="rows to encode (default 32768)")
    parser.add_argument("--decode-rows", type=int, nargs="+", default=[16384, 65536, 262144], help="rows to attend to")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of which the median is taken")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--commit", default=None, help="default: what git says")
    parser.add_argument("--quick", action="store_true", help="few rows and rounds, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.decode_rows, options.rounds = 256, [512], 1
    backend = resolve_backend(options.backend)
    report: dict[str, Any] = {"about": about(options.commit), "backend": backend, "dtype": "bfloat16"}
    inputs = [rows_of(options.rows, i) for i in range(COPIES)]
    seconds = stream(mx.compile(lambda x: -x), inputs, options.rounds)
    report["copy_bytes_per_second"] = 2 * inputs[0].nbytes / seconds
    report["kernels"] = [
        measure(bits, center, inputs, backend, options.rounds, report["copy_bytes_per_second"])
        for bits in options.bits
        for center in (False, True)
    ]
    report["decode"] = [attention(rows, backend, options.rounds) for rows in options.decode_rows]
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def about(commit: str | None) -> dict[str, Any]:
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "device": {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)},
        "system": platform.platform(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-kv-rvq": version("mlx-kv-rvq"),
        "commit": commit,
    }


def measure(
    bits: int, center: bool, inputs: Sequence[mx.array], backend: str, rounds: int, copy: float
) -> dict[str, Any]:
    """Encoding and decoding; raises where the kernel's codes are not the reference's."""

    def encoded(x: mx.array, backend: str) -> list[mx.array]:
        return [array for array in encode(x, bits, center=center, backend=backend) if array is not None]

    def decoded(arrays: list[mx.array], backend: str) -> mx.array:
        return decode(Encoded(*arrays), bits, channels=DIM, dtype=mx.bfloat16, backend=backend)

    codes = [encoded(x, backend) for x in inputs]
    for x, arrays in zip(inputs, codes, strict=True):
        if not all(mx.array_equal(a, b) for a, b in zip(arrays, encoded(x, "reference"), strict=True)):
            raise SystemExit(f"{bits} bit, center={center}: the kernel's codes are not the reference's")
    moved = inputs[0].nbytes + sum(array.nbytes for array in codes[0])
    result: dict[str, Any] = {"bits": bits, "center": center, "shape": list(inputs[0].shape), "bytes": moved}
    for name, op, given in (("encode", encoded, inputs), ("decode", decoded, codes)):
        kernel, reference = (stream(partial(op, backend=which), given, rounds) for which in (backend, "reference"))
        result[name] = {
            "us": 1e6 * kernel,
            "reference_us": 1e6 * reference,
            "times_reference": reference / kernel,
            "share_of_copy": moved / kernel / copy,
        }
    return result


def attention(rows: int, backend: str, rounds: int) -> dict[str, Any]:
    """A decode step over 2-bit rows, the query rotated and the output rotated back, beside attention over bfloat16."""
    scale = DIM**-0.5
    keys, values = (rows_of(rows, i) for i in range(2))
    stores = [RvqStore(Rvq()) for _ in range(COPIES)]
    for store in stores:
        store.append(keys, values)
        store.settle()
        mx.eval(store.arrays())
    queries = [rows_of(1, i, QUERY_HEADS) for i in range(COPIES)]
    layouts = [store.layout() for store in stores]

    def fused(i: int) -> mx.array:
        layout = layouts[i]
        if layout is None:
            raise SystemExit("expected encoded rows")
        return attend(queries[i], layout, scale, backend=backend)

    def dense(i: int) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries[i], keys, values, scale=scale)

    got, read = fused(0).astype(mx.float32), [rows.astype(mx.float32) for rows in stores[0].dense()]
    truth = mx.fast.scaled_dot_product_attention(queries[0].astype(mx.float32), *read, scale=scale)
    times = {
        name: 1e6 * stream(op, range(COPIES), rounds) for name, op in (("fused_us", fused), ("bfloat16_us", dense))
    }
    return {
        "rows": rows,
        **times,
        "ratio": times["fused_us"] / times["bfloat16_us"],
        "relative_error": float(mx.linalg.norm(got - truth) / mx.linalg.norm(truth)),
        "bytes_held": stores[0].nbytes,
    }


def stream(op: Callable[[Any], Any], inputs: Sequence[Any], rounds: int) -> float:
    """Median seconds of a call, when calls follow each other."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(4):
            mx.async_eval([op(x) for x in inputs])
        mx.synchronize()
        return (time.perf_counter() - begin) / (4 * len(inputs))

    for _ in range(2):
        once()
    return statistics.median(once() for _ in range(rounds))


def rows_of(rows: int, seed: int, heads: int = HEADS) -> mx.array:
    x = mx.random.normal((1, heads, rows, DIM), key=mx.random.key(seed)).astype(mx.bfloat16)
    mx.eval(x)
    return x


if __name__ == "__main__":
    main()
