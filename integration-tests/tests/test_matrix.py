"""Every policy over every store, under each kind of attention, in families whose layers differ.

Each package tests its own method in depth; here is what only shows when they meet.
"""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from mlx_kv import CompressedKVCache, make_prompt_cache, memory_report
from mlx_kv.testing.models import tiny_model
from mlx_kv_kernels.testing import not_run

PROMPT, CHUNK, STEPS = 280, 140, 4
BUDGET = 128
FAMILIES = ["gemma3_text", "gpt_oss", "qwen3_next"]  # with sliding windows; with sink logits too; recurrent
STORES = {"dense": "dense", "kivi": "kivi(residual=32)", "rvq": "rvq(residual=32, center=False)"}
POLICIES = {
    "snapkv": "snapkv(budget={budget}, window=8)",
    "pyramidkv": "pyramidkv(budget={budget}, window=8)",
    "h2o": "h2o(heavy={half}, recent={half})",
    "keyformer": "keyformer(budget={budget})",
}
EVERY_STEP = {"h2o", "keyformer"}  # drop a row at each step of decoding


def pairs(chosen):
    """The pairs of a policy and a store that are chosen, as parameters of a test."""
    return pytest.mark.parametrize(
        ("policy", "store"),
        [
            pytest.param(policy, store, marks=pytest.mark.needs(policy, store), id=f"{policy}+{store}")
            for policy in POLICIES
            for store in STORES
            if chosen(policy, store)
        ],
    )


def fit(policy, store):
    """KIVI packs groups of tokens: single rows cannot leave."""
    return store != "kivi" or policy not in EVERY_STEP


def spec(policy, store, budget):
    return f"{POLICIES[policy].format(budget=budget, half=budget // 2)}+{STORES[store]}"


def feed(model, cache):
    """Feed a prompt in chunks, its last token alone, then a few more; return the logits of the last token."""
    tokens = mx.random.randint(0, 96, (1, PROMPT + STEPS), key=mx.random.key(7))
    for first, last in [(0, CHUNK), (CHUNK, PROMPT - 1), *((n, n + 1) for n in range(PROMPT - 1, PROMPT + STEPS))]:
        logits = model(tokens[:, first:last], cache=cache)
        mx.eval(logits)
    return logits[0, -1]


def compressed(cache):
    return [layer for layer in cache if isinstance(layer, CompressedKVCache)]


@pytest.mark.parametrize("family", FAMILIES)
@pairs(fit)
def test_the_budget_holds_and_bytes_follow(policy, store, family):
    model = tiny_model(family)
    cache, own = make_prompt_cache(model, spec(policy, store, BUDGET)), own_prompt_cache(model)
    assert mx.isfinite(feed(model, cache)).all()
    feed(model, own)
    layers = compressed(cache)
    assert layers
    assert [layer.offset for layer in layers] == [PROMPT + STEPS] * len(layers)
    # A share of the rows per layer (pyramidkv) keeps the budget on average; tokens after the prompt come on top.
    assert sum(sum(layer.store.lengths) for layer in layers) <= (BUDGET + STEPS) * len(layers)
    for layer, other in zip(memory_report(cache).layers, own, strict=True):
        assert layer.bytes_held < other.nbytes if layer.method else layer.bytes_held == other.nbytes


@pytest.mark.parametrize("family", FAMILIES)
@pairs(fit)
def test_a_budget_that_is_not_reached_changes_nothing(policy, store, family):
    model = tiny_model(family)
    # Under a policy a store holds a prompt in full precision until it ends.
    alone = STORES[store].replace(")", ", defer=True)")
    roomy = feed(model, make_prompt_cache(model, spec(policy, store, 4096)))
    assert mx.array_equal(roomy, feed(model, make_prompt_cache(model, alone)))


@pairs(lambda policy, store: not fit(policy, store))
def test_a_policy_that_cannot_drop_rows_of_a_store_is_refused(policy, store):
    with pytest.raises(ValueError, match=rf"\[{store}\] expected a policy that drops rows when a prompt ends"):
        make_prompt_cache(tiny_model("llama"), spec(policy, store, BUDGET))


@pytest.mark.needs("fused")
@pairs(lambda policy, store: fit(policy, store) and (store != "dense" or policy in EVERY_STEP))
def test_fused_attention_gives_the_references_logits(policy, store, monkeypatch):
    """A token is attended to by the kernels, in the emulator; dense rows only where the policy wants the logits."""
    if "emulator" in not_run():
        pytest.skip(not_run()["emulator"])
    emulator = pytest.importorskip("mlx_kv_emulator")
    model = tiny_model("llama")
    reference, fused = (make_prompt_cache(model, spec(policy, store, BUDGET)) for _ in range(2))
    for cache in (reference, fused):
        feed(model, cache)
    token = mx.array([[5]])
    expected = model(token, cache=reference)
    mx.eval(expected)
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    with emulator.counters() as launches:
        logits = model(token, cache=fused)
        mx.eval(logits)
    assert any("attend" in launch.kernel for launch in launches)
    # Sums of the same float32 numbers in another order; logits are of size 1.
    assert mx.abs(logits - expected).max().item() < 1e-4
