"""Times a decode step that drops a row, for H2O and Keyformer, beside MLX's own attention over as many rows.

    python packages/h2o/benchmarks/decode.py results.json [--rows 512 1024 4096] [--quick]

32 query heads and 8 KV heads of 128 channels in bfloat16, one sequence, budgets full. A step appends a token, attends
(through mlx-kv-fused-attention where it is installed), adds the logits to the scores and drops a row. `kernels` is the
step on the backend asked for, `reference` the same with MLX ops in place of every kernel, `attention` MLX's own over
as many rows, nothing appended. Before timing, both steps must answer alike and hold the same rows, but for a few that
scores summed in another order may exchange.

`layers` is the time of a step as a model's layers take them when mlx-lm generates: 32 caches, each of whose queries is
the output of the one before, make a token; it is handed over while the token before is still computed. `apart` is that
of steps of the same caches that do not wait for each other, each of them handed over on its own. `single` is that of
one that is waited for. These three count what the host does. `queued`, on a GPU, does not: the steps of `layers` are
handed over while the device is still busy with something else, so that it has them all before it begins. All are
medians of rounds in which every kind of step has its turn: a host that changes its speed does so for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_kv import CompressedKVCache, Geometry
from mlx_kv.spec import Spec
from mlx_kv_kernels import resolve_backend

PACKAGES = ("mlx", "mlx-kv", "mlx-kv-kernels", "mlx-kv-h2o", "mlx-kv-keyformer", "mlx-kv-fused-attention")
LAYERS, TOKENS, QUEUED, CHECKED, WARM = 32, 8, 4, 16, 3

Op = Callable[[int, mx.array], mx.array]


@dataclass(frozen=True)
class Shape:
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def tokens(self, count: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of some tokens."""
        keys = mx.random.split(mx.random.key(seed), 3)
        heads = (self.query_heads, self.kv_heads, self.kv_heads)
        q, k, v = (mx.random.normal((1, n, count, self.head_dim), key=key) for n, key in zip(heads, keys, strict=True))
        return q.astype(mx.bfloat16), k.astype(mx.bfloat16), v.astype(mx.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where to write the JSON")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 4096], help="budgets")
    parser.add_argument("--backend", default="auto", help="default auto")
    parser.add_argument("--commit", default=None, help="default: what git says")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="few rows and heads, to see that everything runs")
    options = parser.parse_args()
    backend = resolve_backend(options.backend)
    rows, rounds, shape = options.rows, options.rounds, Shape()
    if options.quick:
        rows, rounds, shape = [48], 2, Shape(4, 2, 64)
    report: dict[str, Any] = {"about": about(options.commit), "backend": backend, "dtype": "bfloat16"}
    report |= {"shape": asdict(shape), "cases": []}
    for n in rows:
        for name, spec in (
            ("h2o", f"h2o(heavy={n // 2}, recent={n - n // 2})"),
            ("keyformer", f"keyformer(budget={n})"),
        ):
            case = {"rows": n, "method": name, "spec": spec, **measure(shape, n, spec, backend, rounds)}
            report["cases"].append(case)
            print(line(case), flush=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")


def about(commit: str | None) -> dict[str, Any]:
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    device = {name: value for name, value in mx.device_info().items() if isinstance(value, str | int)}
    versions = {name: found for name in PACKAGES if (found := installed(name))}
    return {"device": device, "system": platform.platform(), "python": platform.python_version(), **versions} | {
        "commit": commit
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextmanager
def using(backend: str) -> Generator[None]:
    """Every kernel of a step asks the environment for its backend."""
    before = os.environ.get("MLX_KV_BACKEND")
    os.environ["MLX_KV_BACKEND"] = backend
    try:
        yield
    finally:
        os.environ.pop("MLX_KV_BACKEND")
        if before is not None:
            os.environ["MLX_KV_BACKEND"] = before


def measure(shape: Shape, rows: int, spec: str, backend: str, rounds: int) -> dict[str, Any]:
    policy, store = Spec.parse(spec).create(
        Geometry(0, shape.query_heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    )
    cache, scale = CompressedKVCache(policy, store), shape.head_dim**-0.5

    def step(cache: CompressedKVCache, tokens: tuple[mx.array, mx.array, mx.array]) -> mx.array:
        queries, keys, values = tokens
        mask = cache.make_mask(queries.shape[2])
        return cache.attend(queries, *cache.update_and_fetch(keys, values), scale, mask)

    with using(backend):
        mx.eval(step(cache, shape.tokens(rows, 0)), step(cache, shape.tokens(1, 1)))
    given = [shape.tokens(1, 100 + i) for i in range(LAYERS)]
    mx.eval(given)
    checked = compare(cache, step, shape, backend)
    ours, theirs = ([deepcopy(cache) for _ in range(LAYERS)] for _ in range(2))
    held = [shape.tokens(rows, 200 + i)[1:] for i in range(LAYERS)]
    mx.eval(held)
    ops: dict[str, tuple[str, Op]] = {
        "kernels": (backend, lambda i, q: step(ours[i], (q, *given[i][1:]))),
        "reference": ("reference", lambda i, q: step(theirs[i], (q, *given[i][1:]))),
        "attention": (backend, lambda i, q: mx.fast.scaled_dot_product_attention(q, *held[i], scale=scale)),
    }
    times = timed(ops, given[0][0], rounds)
    kernels, reference, attention = times["kernels"], times["reference"], times["attention"]
    return {
        **checked,
        **times,
        "times_attention": {how: kernels[how] / attention[how] for how in kernels},
        "faster_than_reference": {how: reference[how] / kernels[how] for how in reference},
    }


def compare(
    cache: CompressedKVCache, step: Callable[..., mx.array], shape: Shape, backend: str
) -> dict[str, float | int]:
    """Steps of two copies: the largest difference of their outputs, and the rows that only one of them holds."""
    ours, reference = deepcopy(cache), deepcopy(cache)
    worst, others = 0.0, 0
    for i in range(CHECKED):
        tokens = shape.tokens(1, 300 + i)
        with using(backend):
            got = step(ours, tokens)
        with using("reference"):
            expected = step(reference, tokens)
        worst = max(worst, mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max().item())
        held = [each.policy.positions.view()[0, ..., 0].tolist() for each in (ours, reference)]
        others = max(others, sum(len(set(a) - set(b)) for a, b in zip(*held, strict=True)))
    # bfloat16 outputs of the order of 1: a few units of their last place; a wrong row would show as 0.1 and more
    if worst > 0.03 or others > shape.kv_heads:
        raise SystemExit(f"off by {worst}, {others} rows are not the reference's")
    return {"largest_difference": worst, "rows_exchanged": others}


def timed(ops: dict[str, tuple[str, Op]], queries: mx.array, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each op(layer, queries) on its backend, by each of the ways to follow each other."""
    ways = layers, apart, single, *([Queued()] if mx.default_device() == mx.gpu else [])
    times: dict[str, dict[str, list[float]]] = {name: {} for name in ops}
    for turn in range(-WARM, rounds):
        for name, (backend, op) in ops.items():
            for way in ways:
                if name == "reference" and isinstance(way, Queued):
                    continue  # MLX does not take as many ops in advance
                with using(backend):
                    seconds = way(op, queries)
                if turn >= 0:
                    times[name].setdefault(way.__name__, []).append(seconds)
    return {name: {how: 1e6 * statistics.median(each) for how, each in own.items()} for name, own in times.items()}


def layers(op: Op, queries: mx.array) -> float:
    begin, output, before = time.perf_counter(), queries, queries
    for _ in range(TOKENS):
        for i in range(LAYERS):
            output = op(i, output)
        mx.async_eval(output)
        mx.eval(before)
        before = output
    mx.synchronize()
    return (time.perf_counter() - begin) / TOKENS / LAYERS


def apart(op: Op, queries: mx.array) -> float:
    begin = time.perf_counter()
    for i in range(LAYERS):
        mx.async_eval(op(i, queries))
    mx.synchronize()
    return (time.perf_counter() - begin) / LAYERS


def single(op: Op, queries: mx.array) -> float:
    begin = time.perf_counter()
    mx.eval(op(0, queries))
    mx.synchronize()
    return time.perf_counter() - begin


class Queued:
    """Steps that wait on the device for products of large matrices, as many of them as the host needs time."""

    __name__ = "queued"

    def __init__(self) -> None:
        self.products = 16
        self.matrix = mx.random.normal((8192, 8192), key=mx.random.key(0)).astype(mx.bfloat16)

    def __call__(self, op: Op, output: mx.array) -> float:
        busy = self.matrix
        for _ in range(self.products):
            busy = busy @ self.matrix
        mx.async_eval(busy)
        for _ in range(QUEUED):
            for i in range(LAYERS):
                output = op(i, output)
            mx.async_eval(output)
        handed_over = time.perf_counter()
        mx.eval(busy)
        begin = time.perf_counter()
        mx.synchronize()
        end = time.perf_counter()
        if begin - handed_over > 1e-3:
            return (end - begin) / QUEUED / LAYERS
        self.products *= 2
        if self.products > 4096:
            raise SystemExit("the host was never done before the device")
        return self(op, output)


def line(case: dict[str, Any]) -> str:
    def of(name: str, digits: int) -> str:
        return ", ".join(f"{how} {number:.{digits}f}" for how, number in case[name].items() if how != "single")

    return (
        f"{case['rows']:6} rows, {case['method']}, us: {of('kernels', 0)}; attention: {of('attention', 0)}; times "
        f"attention: {of('times_attention', 2)}; times faster than the reference: {of('faster_than_reference', 1)}"
    )


if __name__ == "__main__":
    main()
