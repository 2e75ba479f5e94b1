"""Decode steps of an 8B-shaped model: fp16 cache, KIVI 2 bit, mlx-lm's kv_bits=4, and the ceiling, in one run.

    python decode_model.py [--output FILE] [--rows 2048 ...]

Llama-3.1-8B's configuration with random bfloat16 weights made on the device; caches are filled with random rows rather
than by a prompt. A step is one token of `mlx_lm.generate_step`. The ceiling is the fp16 step with attention's share
replaced by the time that reading KIVI's bytes takes at copy bandwidth: no cache of that size can be read faster. Then
steps after a prompt that SnapKV has cut and, beside the fp16 steps of the same run, steps of other methods: those that
hold every row at each length, those that hold a fixed number of rows after one prompt. `host_milliseconds` are steps
over few rows of a model of as many layers with next to no weights: the time that the host takes for a step, which no
cache can undercut. A figure is the mean of a round's steps, and the median of the rounds where there are several. A
round has 256 steps, as many as come between two enlargements of a cache and between two times that generate_step calls
`mx.clear_cache`, so that what goes on now and then counts as often as in a long answer. The first steps of a round, in
which CUDA's graphs are made, do not count: 16, and 144 of the methods that hold a fixed number of rows. Caches grow from
round to round: `rows` are those that they begin with.
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
WARM_UP, ROUNDS = 16, 5
PERIOD = 144  # steps after which every form of a step has come: layers that hold few rows pack a block of 128 in turn
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


def milliseconds_per_step(model, cache, steps, warm_up=WARM_UP):
    times, begin = [], None
    for _ in generate_step(mx.array([1]), model, max_tokens=steps + warm_up, prompt_cache=cache):
        now = time.perf_counter()
        times.append(0.0 if begin is None else now - begin)
        begin = now
    return statistics.mean(times[warm_up:]) * 1e3


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
    return {name: milliseconds_per_step(small, fill(make(), 2048), steps) for name, make in named.items()}


def measure(model, rows, bandwidth, steps):
    """Steps of each cache in turn, round by round: a host may work at half its speed for seconds."""
    held = dict(caches(model, rows))
    result = {"rows": rows, "bytes_held": {name: sum(one.nbytes for one in cache) for name, cache in held.items()}}
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({})
        for name, cache in list(held.items()):
            try:
                rounds[-1][name] = milliseconds_per_step(model, cache, steps)
            except RuntimeError as error:
                if name != "mlx_lm_4_bit":
                    raise
                result["mlx_lm_refused"] = str(error)  # MLX's CUDA backend has no quantised product for some shapes
                del held[name]
    result |= {"milliseconds": {n: statistics.median(r[n] for r in rounds) for n in rounds[-1]}, "rounds": rounds}
    del held, cache
    mx.clear_cache()
    attention = attention_milliseconds(len(model.layers), rows)
    fp16, kivi = result["milliseconds"]["fp16"], result["milliseconds"]["kivi_2_bit"]
    ceiling = fp16 - attention + result["bytes_held"]["kivi_2_bit"] / bandwidth * 1e3
    gain = fp16 - ceiling
    return {
        **result,
        "fp16_attention_milliseconds": attention,
        "ceiling_milliseconds": ceiling,
        "share_of_ceilings_gain": (fp16 - kivi) / gain if gain > 0 else None,
        "speed_against_fp16": fp16 / kivi,
    }


def prompted(model, spec, rows):
    """A cache after a prompt of random tokens."""
    cache = mlx_kv.make_prompt_cache(model, spec)
    tokens = mx.random.randint(0, LLAMA_8B["vocab_size"], (1, rows))
    for first in range(0, rows, 2048):
        mx.eval(model(tokens[:, first : first + 2048], cache)[:, -1])
    return cache


def others(model, fp16, steps):
    """Milliseconds of other methods, and their speed against fp16 caches of so many rows: {spec: {rows: ...}}."""
    found = {}
    for spec in EVERY_ROW + FIXED_ROWS:
        found[spec] = {}
        for rows in fp16:
            if spec in EVERY_ROW:
                cache = fill(mlx_kv.make_prompt_cache(model, spec), rows)
                milliseconds = milliseconds_per_step(model, cache, steps)
            elif not found[spec]:  # as many rows, and so the same steps, however long the prompt
                cache = prompted(model, spec, 1024)
                milliseconds = milliseconds_per_step(model, cache, steps, PERIOD)
            found[spec][rows] = {"milliseconds": milliseconds, "speed_against_fp16": fp16[rows] / milliseconds}
            cache = None
            mx.clear_cache()
        print(spec, json.dumps(found[spec]), flush=True)
    return found


def after_snapkv(model, rows, budget, steps):
    """Steps after a prompt of which SnapKV keeps `budget` rows, in turn with caches that hold all rows, or so few."""
    spec = f"snapkv(budget={budget})"
    caches = {
        "snapkv": prompted(model, spec, rows),
        "fp16": fill([KVCache() for _ in model.layers], rows),
        "fp16_of_as_many_rows": fill([KVCache() for _ in model.layers], budget),
        "dense_of_as_many_rows": fill(mlx_kv.make_prompt_cache(model, "dense"), budget),
    }
    rounds = [
        {name: milliseconds_per_step(model, cache, steps) for name, cache in caches.items()} for _ in range(ROUNDS)
    ]
    milliseconds = {name: statistics.median(one[name] for one in rounds) for name in caches}
    gain = milliseconds["fp16"] - milliseconds["fp16_of_as_many_rows"]
    return {
        "spec": spec,
        "prompt_rows": rows,
        "milliseconds": milliseconds,
        "rounds": rounds,
        "bytes_held": sum(one.nbytes for one in caches["snapkv"]),
        "share_of_as_many_rows_gain": (milliseconds["fp16"] - milliseconds["snapkv"]) / gain if gain > 0 else None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--snapkv", type=int, nargs=2, default=[32768, 1024], help="rows of the prompt, and rows kept")
    parser.add_argument("--steps", type=int, default=256, help="of a round")
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
    results["others"] = others(model, fp16, arguments.steps)
    write(arguments.output, results)


def write(output, results):
    if output:
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
