"""Times KIVI's kernels against a copy and against the reference in MLX ops, after comparing their results.

    python packages/kivi/benchmarks/quantize.py results.json

Inputs are random and rotated, so that no cache holds them. `stream` is the time of a call among many that follow each
other, `single` that of one call that is waited for; both are medians. Kernel and reference are each timed as they are
(`direct`) and under mx.compile, which spares host work and fuses the elementwise ops of the reference. Bandwidths count
bytes read plus bytes written, and are compared with the fastest copy of the same run.
"""

from __future__ import annotations

import argparse
import hashlib
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

from mlx_kv_kernels import resolve_backend
from mlx_kv_kivi import dequantize_keys, dequantize_values, launch, quantize_keys, quantize_values

GROUP_SIZE = 32
ROTATED = 8
KERNELS = (launch.QUANTIZE_KEYS, launch.QUANTIZE_VALUES, launch.DEQUANTIZE_KEYS, launch.DEQUANTIZE_VALUES)
OPS = {
    "quantize_keys": (quantize_keys, None),
    "quantize_values": (quantize_values, None),
    "dequantize_keys": (dequantize_keys, quantize_keys),
    "dequantize_values": (dequantize_values, quantize_values),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--rows", type=int, default=32768, help="rows of the long case (default 32768)")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="default all")
    parser.add_argument("--backend", default="auto", help="default auto")
    parser.add_argument("--commit", default=None, help="default: what git says")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of which the median is taken")
    options = parser.parse_args()
    backend = resolve_backend(options.backend)
    report = {"about": about(options.commit), "backend": backend, "group_size": GROUP_SIZE, "dtype": "bfloat16"}
    report["copy"] = copies(options.rows, options.rounds)
    fastest = max(report["copy"].values())
    cases = [
        (name, bits, (1, 8, rows, 128))
        for rows in (options.rows, 128, 1)
        for name in options.ops
        for bits in (2, 4)
        if rows % GROUP_SIZE == 0 or name.endswith("values")
    ]
    report["cases"] = []
    for name, bits, shape in cases:
        report["cases"].append(measure(name, bits, shape, backend, options.rounds, fastest))
        options.output.write_text(json.dumps(report, indent=1) + "\n")  # what has run is there if the rest does not
        print(row(report["cases"][-1]), flush=True)
    print(f"copy {fastest / 1e9:.0f} GB/s; {report['about']}; written to {options.output}")


def about(commit: str | None) -> dict[str, Any]:
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "device": {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)},
        "system": platform.platform(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-kv-kivi": version("mlx-kv-kivi"),
        "commit": commit,
        "sha256 of the kernels": {kernel.name: hashlib.sha256(kernel.text.encode()).hexdigest() for kernel in KERNELS},
    }


def copies(rows: int, rounds: int) -> dict[str, float]:
    """Bytes a second (read plus written) of the ways MLX has to copy, at the long case's size and at 8 times that."""
    rates: dict[str, float] = {}
    for factor in (1, 8):
        inputs = random_rows((1, 8, rows * factor, 128), 8 if factor == 1 else 3)
        for name, op in (("negate", mx.compile(lambda x: -x)), ("contiguous", lambda x: mx.contiguous(x[..., 1:, :]))):
            seconds = stream(op, inputs, rounds)
            rates[f"{name}, {inputs[0].nbytes >> 20} MiB"] = 2 * inputs[0].nbytes / seconds
    return rates


def measure(
    name: str, bits: int, shape: tuple[int, ...], backend: str, rounds: int, copy_rate: float
) -> dict[str, Any]:
    """One op's times; raises where the kernel's result is not the reference's."""
    op, prepare = OPS[name]
    arguments = {"bits": bits, "group_size": GROUP_SIZE}
    inputs: Sequence[Any] = random_rows(shape, ROTATED)
    if prepare:
        inputs = [prepare(x, **arguments, backend="reference") for x in inputs]
        mx.eval(inputs)
    kernel = partial(op, **arguments, backend=backend)
    reference = partial(op, **arguments, backend="reference")
    for x in inputs:
        for a, b in zip(arrays_of(kernel(x)), arrays_of(reference(x)), strict=True):
            if not mx.array_equal(a, b):
                raise SystemExit(f"{name}, {bits} bit, {list(shape)}: the kernel's result is not the reference's")
    nbytes = sum(a.nbytes for a in (*arrays_of(inputs[0]), *arrays_of(kernel(inputs[0]))))
    times: dict[str, dict[str, float]] = {}
    for which, function in (("kernel", kernel), ("reference", reference)):
        compiled = mx.compile(function)
        times[which] = {
            "stream_us": 1e6 * stream(compiled, inputs, rounds),
            "stream_direct_us": 1e6 * stream(function, inputs, rounds),
            "single_us": 1e6 * single(compiled, inputs, rounds),
            "single_direct_us": 1e6 * single(function, inputs, rounds),
        }
    rate = nbytes / times["kernel"]["stream_us"] * 1e6
    return {
        "op": name,
        "bits": bits,
        "shape": list(shape),
        "equals_reference": True,
        "bytes": nbytes,
        **times,
        "bytes_per_second": rate,
        "share_of_copy": rate / copy_rate,
        "times_reference": {key: times["reference"][key] / value for key, value in times["kernel"].items()},
    }


def stream(op: Callable[[Any], Any], inputs: Sequence[Any], rounds: int) -> float:
    """Seconds a call, when calls follow each other."""
    batches = 4

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(batches):
            mx.async_eval([op(x) for x in inputs])
        mx.synchronize()
        return (time.perf_counter() - begin) / (batches * len(inputs))

    return median(once, rounds)


def single(op: Callable[[Any], Any], inputs: Sequence[Any], rounds: int) -> float:
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


def random_rows(shape: tuple[int, ...], count: int) -> list[mx.array]:
    rows = [mx.random.normal(shape, key=mx.random.key(i)).astype(mx.bfloat16) for i in range(count)]
    mx.eval(rows)
    return rows


def arrays_of(value: Any) -> tuple[mx.array, ...]:
    return (value,) if isinstance(value, mx.array) else tuple(value)


def row(case: dict[str, Any]) -> str:
    kernel, reference, faster = case["kernel"], case["reference"], case["times_reference"]
    return (
        f"{case['op']:18} {case['bits']} bit {case['shape']!s:20} stream {kernel['stream_us']:7.1f} us "
        f"({case['share_of_copy']:4.0%} of copy; reference {reference['stream_us']:8.1f}, x{faster['stream_us']:.1f}; "
        f"direct {kernel['stream_direct_us']:.1f} x{faster['stream_direct_us']:.1f}) "
        f"single {kernel['single_us']:.1f} x{faster['single_us']:.1f} "
        f"direct {kernel['single_direct_us']:.1f} x{faster['single_direct_us']:.1f}"
    )


if __name__ == "__main__":
    main()
