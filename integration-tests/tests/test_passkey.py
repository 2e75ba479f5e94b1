"""A key hidden in 1,440 tokens of real text, asked of SmolLM2 through 256 of its rows."""

import mlx.core as mx
import pytest

from mlx_kv import Geometry, make_prompt_cache
from mlx_kv.spec import Spec
from mlx_kv.testing.baselines import LastRows, RandomRows, under
from mlx_kv.testing.exponentials import numpy_exponentials
from mlx_kv.window import WindowOptions
from mlx_kv_cli import lm
from mlx_kv_cli.passkey import make_prompt

pytestmark = [pytest.mark.slow, pytest.mark.needs("snapkv", "pyramidkv")]

BUDGET = 256
PLAIN = WindowOptions(budget=BUDGET, window=8)
POLICIES = {
    "full": lambda geometry: Spec.parse("keep_all").policy.create(geometry),
    "snapkv": lambda geometry: Spec.parse(f"snapkv(budget={BUDGET}, window=8)").policy.create(geometry),
    "pyramidkv": lambda geometry: Spec.parse(f"pyramidkv(budget={BUDGET})").policy.create(geometry),
    "random rows": lambda geometry: RandomRows(PLAIN, geometry.layer),
    "last rows": lambda geometry: LastRows(PLAIN),
}
# 20 keys at five depths, in both fillers, are what benchmarks/passkey.py hides.
PROMPTS = [("documentation", 0.5, 0)]


@pytest.fixture(scope="module")
def found(smollm2, shown):
    """How many keys each policy finds; one prefill serves all, since rows are dropped when a prompt ends."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    found = dict.fromkeys(POLICIES, 0)
    for filler, depth, seed in PROMPTS:
        prompt, key = make_prompt(tokenizer, 1440, depth, seed, filler)
        prefilled = make_prompt_cache(model, "snapkv(budget=65536, window=8)")
        with numpy_exponentials():
            lm.feed(model, mx.array([prompt[:-1]]), prefilled)
        for name, create in POLICIES.items():
            cache = [under(layer, create(Geometry(**layer.origin["geometry"]))) for layer in prefilled]
            answer = ""
            for piece in lm.stream(model, tokenizer, prompt[-1:], cache, max_tokens=6, sampling=lm.Sampling()):
                answer = (answer + piece.text).lstrip()
                if not key.startswith(answer):  # it is the key and more, or will not be it
                    break
            found[name] += answer.startswith(key)
    shown.append("\n".join(f"{name:12} {count} of {len(PROMPTS)}" for name, count in found.items()))
    return found


@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
def test_the_key_is_found(found, name):
    assert found[name] == len(PROMPTS)


@pytest.mark.parametrize("name", ["random rows", "last rows"])
def test_rows_kept_without_the_queries_lose_the_key(found, name):
    assert found[name] == 0
