"""Real text through encoded caches: the protocol of `mlx_kv perplexity`, on half of its text."""

import pydoc_data.topics

import mlx.core as mx
import pytest

from mlx_kv import make_prompt_cache
from mlx_kv.testing.driving import contents
from mlx_kv.testing.exponentials import numpy_exponentials
from mlx_kv_cli.models import load_model
from mlx_kv_cli.perplexity import perplexities
from mlx_kv_rvq import Rvq, RvqStore

# Largest ratio to the full cache's perplexity. The whole text, 1,536 tokens, is in benchmarks/results.
LIMITS = {"rvq": 1.16, "rvq(key_bits=3, value_bits=3)": 1.05}


@pytest.fixture(scope="module")
def results():
    loaded = load_model("smollm2")
    tokens = loaded.tokenizer.encode(pydoc_data.topics.topics["typesseq"])[:768]
    factories = {spec: lambda spec=spec: make_prompt_cache(loaded.model, spec) for spec in LIMITS}
    with numpy_exponentials():
        return perplexities(loaded.model, tokens, factories, prefill=512, chunk=64)


@pytest.mark.parametrize("spec", LIMITS)
def test_ratio_to_the_full_cache(results, spec):
    assert results[spec].ratio <= LIMITS[spec]


@pytest.mark.parametrize(("config", "bits"), [(Rvq(), 2.5), (Rvq(key_bits=3), 3.0), (Rvq(3, 3), 3.5)])
def test_bits_of_an_element_beyond_the_exact_rows(config, bits):
    """What codes, norms and means of a half-precision model of SmolLM2's shape hold."""
    store = RvqStore(config)
    store.append(*(mx.random.normal((1, 3, 1536, 64), mx.float16, key=mx.random.key(i)) for i in range(2)))
    store.settle()
    packed = {name: rows for name, rows in contents(store)[0].items() if name.endswith(("codes", "norm", "mean"))}
    elements = 3 * 64 * sum(store.buffers()[f"{side}_codes"].lengths[0] for side in ("keys", "values"))
    assert 8 * sum(map(len, packed.values())) / elements <= bits
