"""Perplexity of real text through RVQ: the protocol of `mlx_kv perplexity`, on half of its text."""

import pydoc_data.topics

import pytest

from mlx_kv import make_prompt_cache
from mlx_kv.testing.exponentials import numpy_exponentials
from mlx_kv_cli.perplexity import perplexities

pytestmark = [pytest.mark.slow, pytest.mark.needs("rvq")]

# Largest ratio to the full cache's perplexity. The whole text, 1,536 tokens, is in packages/rvq/benchmarks/results.
LIMITS = {"rvq": 1.16, "rvq(key_bits=3, value_bits=3)": 1.05}


@pytest.fixture(scope="module")
def results(smollm2):
    tokens = smollm2.tokenizer.encode(pydoc_data.topics.topics["typesseq"])[:768]
    factories = {spec: lambda spec=spec: make_prompt_cache(smollm2.model, spec) for spec in LIMITS}
    with numpy_exponentials():
        return perplexities(smollm2.model, tokens, factories, prefill=512, chunk=64)


@pytest.mark.parametrize("spec", LIMITS)
def test_ratio_to_the_full_cache(results, spec):
    assert results[spec].ratio <= LIMITS[spec]
