"""A key hidden in 1,440 tokens of real text, asked of SmolLM2 through 256 of its rows."""

import pytest

from mlx_kv import CompressedKVCache, DenseStore, make_prompt_cache
from mlx_kv.testing.baselines import LastRows, RandomRows
from mlx_kv.testing.exponentials import numpy_exponentials
from mlx_kv.window import WindowOptions
from mlx_kv_cli.passkey import passkeys

pytestmark = [pytest.mark.slow, pytest.mark.needs("snapkv", "pyramidkv")]

BUDGET = 256
SPECS = {"full": "dense", "snapkv": f"snapkv(budget={BUDGET}, window=8)", "pyramidkv": f"pyramidkv(budget={BUDGET})"}
BASELINES = {"random rows": RandomRows, "last rows": LastRows}


@pytest.fixture(scope="module")
def found(smollm2, shown):
    """How many of one key are found; benchmarks/passkey.py hides 20 at five depths, in both fillers."""
    model, plain = smollm2.model, WindowOptions(budget=BUDGET, window=8)
    factories = {name: lambda spec=spec: make_prompt_cache(model, spec) for name, spec in SPECS.items()}
    factories |= {
        name: lambda policy=policy: [CompressedKVCache(policy(plain), DenseStore()) for _ in model.layers]
        for name, policy in BASELINES.items()
    }
    with numpy_exponentials():
        results = passkeys(model, smollm2.tokenizer, factories, filler="documentation", depths=(0.5,), seeds=range(1))
    shown.append("\n".join(f"{name:12} {result.successes} of 1" for name, result in results.items()))
    return {name: result.successes for name, result in results.items()}


@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
def test_the_key_is_found(found, name):
    assert found[name] == 1


@pytest.mark.parametrize("name", ["random rows", "last rows"])
def test_rows_kept_without_the_queries_lose_the_key(found, name):
    assert found[name] == 0
