"""Caches on disk: whole, refused, or gone on with in another process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from ..errors import CacheFileError
from ..factory import make_prompt_cache
from ..persistence import load_prompt_cache, save_prompt_cache
from .driving import ConformanceError, expect
from .generation import greedy, random_prompt
from .models import tiny_model

_ELSEWHERE = """
import json, sys
from mlx_kv import load_prompt_cache
from mlx_kv.testing.generation import greedy
from mlx_kv.testing.models import tiny_model
model = tiny_model(sys.argv[1])
cache = load_prompt_cache(sys.argv[2], model)
print(json.dumps(greedy(model, [5], cache, 30)))
"""


def check_another_process_goes_on(spec: str) -> None:
    """Save, load in a new process, continue greedily: identical to never having stopped."""
    name = "gemma3_text"  # with layers that keep mlx-lm's own cache
    model, prompt = tiny_model(name), random_prompt(0, 230)
    cache = make_prompt_cache(model, spec)
    greedy(model, prompt, cache, 10)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        save_prompt_cache(file, cache)
        right = greedy(model, [5], cache, 30)
        command = [sys.executable, "-c", _ELSEWHERE, name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, spec, f"a saved cache does not load in a new process: {done.stderr[-2000:]}")
    got = json.loads(done.stdout.splitlines()[-1])
    expect(got == right, spec, f"a cache loaded in a new process goes on with {got}, the original with {right}")


def check_bad_files_are_refused(spec: str) -> None:
    """A damaged file, or one of another model or method, is refused with CacheFileError."""
    model = tiny_model("llama")
    cache = make_prompt_cache(model, spec)
    greedy(model, random_prompt(0, 200), cache, 5)
    with tempfile.TemporaryDirectory() as folder:
        file, damaged = Path(folder) / "cache.safetensors", Path(folder) / "damaged.safetensors"
        save_prompt_cache(file, cache, {"note": "kept"})
        loaded, metadata = load_prompt_cache(file, model, spec, return_metadata=True)
        expect(metadata == {"note": "kept"} and len(loaded) == len(cache), spec, "a good file does not load")

        whole = file.read_bytes()
        draw = random.Random(0)
        cases = [(whole[:size], f"cut at byte {size}") for size in range(0, len(whole), 1024)]
        for _ in range(60):
            place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
            flipped = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
            cases.append((flipped, f"with byte {place} flipped by {bit}"))
        for content, what in cases:
            damaged.write_bytes(content)
            _refused(spec, damaged, model, None, f"a file {what}")
        _refused(spec, file, tiny_model("llama", seed=1), None, "a file of a model with other weights")
        _refused(spec, file, tiny_model("qwen3"), None, "a file of another architecture")
        if cache[0].method != "dense":
            _refused(spec, file, model, "dense", "a file of another method")


def _refused(spec: str, file: Path, model: object, method: str | None, what: str) -> None:
    try:
        load_prompt_cache(file, model, method)
    except CacheFileError:
        return
    raise ConformanceError(f"[{spec}] {what} must be refused with CacheFileError, and was loaded")
