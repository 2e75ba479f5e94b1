"""Decode steps of an 8B-shaped model: fp16 cache, KIVI 2 bit, mlx-lm's kv_bits=4, and the ceiling, in one run.

    python decode_model.py [--output FILE] [--rows 2048 ...]

Llama-3.1-8B's configuration with random bfloat16 weights made on the device; caches are filled with random rows rather
than by a prompt. A step is one token of `mlx_lm.generate_step`. The ceiling is the fp16 step with attention's share
replaced by the time that reading KIVI's bytes takes at copy bandwidth: no cache of that size can be read faster. Then
steps after a prompt that SnapKV has cut and, beside the fp16 steps of the same run, steps of other methods: those that
hold every row at each length, those that hold a fixed number of rows after one prompt. `host_milliseconds` are steps
over few rows of a model of as many layers with next to no weights: the time that the host takes for a step, which no
cache can undercut.

Hosts stop for milliseconds now and then, at no particular step; a cache does more at some steps than at others, at
the same ones of every 256: it packs rows, it grows, and generate_step calls `mx.clear_cache`. So caches of one length
decode in turn for some rounds of as many steps, a step's time is the median of its place in all rounds, and a figure
the mean over a round's steps: without the stops, which `of_rounds`, the plain means, has as well. Not counted are the
first 144 steps of a cache, in which CUDA's graphs are made, and the first 8 of a round. Caches grow meanwhile: they
begin with `rows` and have `mean_rows` on the mean, for which the ceiling is worked out. The other methods decode
alone, each at its own time, for fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import mlx_kv

KIVI = "kivi(bits=2, group_size=64)"
EVERY_ROW = ["rvq", "dense"]
FIXED_ROWS = [
    "h2o(heavy=128, recent=128)",
    "keyformer(budget=256)",
    "snapkv(budget=256, window=8)",
    "pyramidkv(budget=256)",
    "snapkv(budget=256, window=8)+kivi(bits=4)",
    "pyramidkv(budget=256)+rvq",
    "h2o(heavy=128, recent=128)+rvq(center=False)",
]
WARM_UP = 144  # steps after which every form of a step has come: layers that hold few rows pack a block of 128 in turn
ROUNDS = 5
BEGIN = 8  # steps of a round until the device has as much to do ahead as in a long answer
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def make_model(layers, **changes):
    model = llama.Model(llama.ModelArgs.from_dict({**LLAMA_8B, "num_hidden_layers": layers, **changes}))
    model.update(tree_map(lambda p: mx.random.normal(p.shape, scale=0.02, dtype=mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def rows_of(count, seed):
    return (mx.random.normal((1, 8, count, 128), dtype=mx.bfloat16, key=mx.random.key(seed + i)) for i in range(2))


def fill(cache, rows):
    """Append random rows to every layer's cache, in the chunks of a prompt."""
    for layer, one in enumerate(cache):
        for first in range(0, rows, 16384):
            keys, values = rows_of(min(16384, rows - first), 2 * layer + first)
            one.update_and_fetch(keys, values)
            if hasattr(one, "store"):
                one._returned = None  # nobody attends to these
                one.store.settle()
        mx.eval(one.state[0] if hasattr(one, "store") else one.state)
    return cache


def caches(model, rows):
    layers = len(model.layers)
    yield "fp16", fill([KVCache() for _ in range(layers)], rows)
    yield "kivi_2_bit", fill(mlx_kv.make_prompt_cache(model, KIVI), rows)
    yield "mlx_lm_4_bit", fill([QuantizedKVCache(group_size=64, bits=4) for _ in range(layers)], rows)


def milliseconds_per_step(model, caches, steps, rounds=3):
    """Return {name: milliseconds} of caches that take turns, and the means of each round."""
    answers = {name: generate_step(mx.array([1]), model, max_tokens=-1, prompt_cache=c) for name, c in caches.items()}
    for tokens in answers.values():
        seconds_of(tokens, WARM_UP)
    times = [{name: seconds_of(tokens, steps)[BEGIN:] for name, tokens in answers.items()} for _ in range(rounds)]
    medians = {
        name: [statistics.median(place) for place in zip(*[r[name] for r in times], strict=True)] for name in answers
    }
    means = [{name: statistics.mean(seconds) * 1e3 for name, seconds in one.items()} for one in times]
    return {name: statistics.mean(of_steps) * 1e3 for name, of_steps in medians.items()}, means


def seconds_of(tokens, steps):
    times, begin = [], time.perf_counter()
    for _ in range(steps):
        next(tokens)
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
    return times


def refusal(model, cache):
    """What MLX says where it has no kernel for a cache; None if it has."""
    try:
        next(generate_step(mx.array([1]), model, max_tokens=1, prompt_cache=cache))
    except RuntimeError as error:
        return str(error)
    return None


def attention_milliseconds(layers, rows, calls=96):
    """MLX's own attention over bfloat16 rows, all layers, back to back, each call on its way before the next is made.

    Handed over together, calls would wait for the host to describe all of them, and that would count as attention.
    """
    scale, query = 128**-0.5, mx.random.normal((1, 32, 1, 128), dtype=mx.bfloat16)
    pairs = [tuple(rows_of(rows, seed)) for seed in range(3)]
    mx.eval(query, pairs)

    def once(n):
        mx.synchronize()
        begin = time.perf_counter()
        for i in range(n):
            mx.async_eval(mx.fast.scaled_dot_product_attention(query, *pairs[i % 3], scale=scale))
        mx.synchronize()
        return (time.perf_counter() - begin) / n

    once(6)
    return statistics.median(once(calls) for _ in range(5)) * layers * 1e3


def copy_bandwidth():
    """Bytes a second, read plus written."""
    arrays = [mx.random.normal((1 << 28,), key=mx.random.key(i)) for i in range(2)]
    mx.eval(arrays)

    def once():
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval([arrays[i % 2] + 1 for i in range(6)])
        mx.synchronize()
        return (time.perf_counter() - begin) / 6

    once()
    return 2 * arrays[0].nbytes / statistics.median(once() for _ in range(5))


def host(layers, steps):
    """Milliseconds of a step with hardly any work for the device."""
    small = make_model(layers, hidden_size=256, intermediate_size=256, vocab_size=1024)
    named = {"fp16": lambda: [KVCache() for _ in range(layers)]}
    named |= {spec: lambda spec=spec: mlx_kv.make_prompt_cache(small, spec) for spec in (KIVI, "dense")}
    return milliseconds_per_step(small, {name: fill(make(), 2048) for name, make in named.items()}, steps)[0]


def measure(model, rows, bandwidth, steps):
    """Steps of each cache, and the ceiling."""
    held = dict(caches(model, rows))
    begin = bytes_of(held)
    result = {"rows": rows, "mean_rows": rows + WARM_UP + ROUNDS * steps // 2, "bytes_held": begin}
    if refused := refusal(model, held["mlx_lm_4_bit"]):  # MLX's CUDA backend has no quantised product for some shapes
        result["mlx_lm_refused"] = refused
        del held["mlx_lm_4_bit"]
    result["milliseconds"], result["of_rounds"] = milliseconds_per_step(model, held, steps, ROUNDS)
    kivi_bytes = (begin["kivi_2_bit"] + bytes_of(held)["kivi_2_bit"]) / 2
    del held
    mx.clear_cache()
    attention = attention_milliseconds(len(model.layers), result["mean_rows"])
    fp16, kivi = result["milliseconds"]["fp16"], result["milliseconds"]["kivi_2_bit"]
    ceiling = fp16 - attention + kivi_bytes / bandwidth * 1e3
    gain = fp16 - ceiling
    return {
        **result,
        "fp16_attention_milliseconds": attention,
        "ceiling_milliseconds": ceiling,
        "share_of_ceilings_gain": (fp16 - kivi) / gain if gain > 0 else None,
        "speed_against_fp16": fp16 / kivi,
    }


def bytes_of(held):
    return {name: sum(one.nbytes for one in cache) for name, cache in held.items()}


def prompted(model, spec, rows):
    """A cache after a prompt of random tokens."""
    cache = mlx_kv.make_prompt_cache(model, spec)
    tokens = mx.random.randint(0, LLAMA_8B["vocab_size"], (1, rows))
    for first in range(0, rows, 2048):
        mx.eval(model(tokens[:, first : first + 2048], cache)[:, -1])
    return cache


def others(model, fp16, steps):
    """Yield other methods' milliseconds, and their speed against fp16 caches of so many rows: spec, {rows: ...}."""

    def alone(cache):
        milliseconds = milliseconds_per_step(model, {"": cache}, steps)[0][""]
        mx.clear_cache()
        return milliseconds

    for spec in EVERY_ROW + FIXED_ROWS:
        if spec in EVERY_ROW:
            times = {rows: alone(fill(mlx_kv.make_prompt_cache(model, spec), rows)) for rows in fp16}
        else:  # as many rows, and so the same steps, however long the prompt
            times = dict.fromkeys(fp16, alone(prompted(model, spec, 1024)))
        yield spec, {n: {"milliseconds": ms, "speed_against_fp16": fp16[n] / ms} for n, ms in times.items()}


def after_snapkv(model, rows, budget, steps):
    """Steps after a prompt of which SnapKV keeps `budget` rows, in turn with caches that hold all rows, or so few."""
    spec = f"snapkv(budget={budget})"
    caches = {
        "snapkv": prompted(model, spec, rows),
        "fp16": fill([KVCache() for _ in model.layers], rows),
        "fp16_of_as_many_rows": fill([KVCache() for _ in model.layers], budget),
        "dense_of_as_many_rows": fill(mlx_kv.make_prompt_cache(model, "dense"), budget),
    }
    milliseconds, of_rounds = milliseconds_per_step(model, caches, steps)
    gain = milliseconds["fp16"] - milliseconds["fp16_of_as_many_rows"]
    return {
        "spec": spec,
        "prompt_rows": rows,
        "milliseconds": milliseconds,
        "of_rounds": of_rounds,
        "bytes_held": sum(one.nbytes for one in caches["snapkv"]),
        "share_of_as_many_rows_gain": (milliseconds["fp16"] - milliseconds["snapkv"]) / gain if gain > 0 else None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--snapkv", type=int, nargs=2, default=[32768, 1024], help="rows of the prompt, and rows kept")
    parser.add_argument("--steps", type=int, default=256, help="of a round, a multiple of 256")
    parser.add_argument("--commit", help="default: what git says")
    arguments = parser.parse_args()
    model, bandwidth = make_model(arguments.layers), copy_bandwidth()
    commit = arguments.commit
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    results = {
        "device": str(mx.device_info().get("device_name")),
        "mlx": mx.__version__,
        "mlx_lm": version("mlx-lm"),
        "commit": commit,
        "spec": KIVI,
        "model": {**LLAMA_8B, "num_hidden_layers": arguments.layers},
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "host_milliseconds": host(arguments.layers, arguments.steps),
        "cases": [],
    }
    print(json.dumps(results["host_milliseconds"]), flush=True)
    for rows in arguments.rows:
        results["cases"].append(measure(model, rows, bandwidth, arguments.steps))
        print(json.dumps(results["cases"][-1]), flush=True)
        write(arguments.output, results)
    results["after_snapkv"] = after_snapkv(model, *arguments.snapkv, arguments.steps)
    print(json.dumps(results["after_snapkv"]), flush=True)
    write(arguments.output, results)
    fp16 = {case["rows"]: case["milliseconds"]["fp16"] for case in results["cases"]}
    results["others"] = {}
    for spec, of_rows in others(model, fp16, arguments.steps):
        results["others"][spec] = of_rows
        print(spec, json.dumps(of_rows), flush=True)
        write(arguments.output, results)


def write(output, results):
    if output:
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
