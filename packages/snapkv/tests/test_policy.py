"""SnapKV in a cache: when it selects, what is kept, and that the model sees exactly that."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from mlx_kv import make_prompt_cache, memory_report
from mlx_kv.testing import CHECKS, check_name, tiny_model
from mlx_kv.testing.driving import GEOMETRY, contents, feed, new_cache, pad, random_tokens, same_bits, step
from mlx_kv.testing.window import MaskedCache

ROW = 4 * GEOMETRY.kv_heads * (GEOMETRY.key_dim + GEOMETRY.value_dim)  # bytes of a row in float32

SPECS = ["snapkv(budget=100)", "snapkv(budget=100, sinks=4, every_chunk=True, decode_budget=90, interval=16)"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, spec):
    check(spec)


def held_keys(cache):
    """The keys held, sequence by sequence."""
    keys = np.array(cache.keys_and_values()[0])
    return [keys[b, :, :rows] for b, rows in enumerate(cache.store.lengths)]


def logits(model, cache, chunks, seed=0):
    tokens = mx.random.randint(0, 96, (1, sum(chunks)), key=mx.random.key(seed))
    outputs = []
    for n in chunks:
        outputs.append(model(tokens[:, :n], cache=cache))
        mx.eval(outputs[-1], [layer.state for layer in cache])
        tokens = tokens[:, n:]
    return mx.concatenate(outputs, axis=1)


# Chunks of fewer than 32 tokens: with more, mlx-lm sorts what it sends to the experts of gpt_oss, and MLX's product of
# sorted float32 rows is off by 1e-2 on CUDA, so that a token may go to another expert.
TURNS = [[31, 31, 31, 26, 1], [1] * 5, [30, 1], [1] * 3]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_tokens_after_eviction_equal_an_explicit_mask(family):
    """Field reports 35 and 36: kept keys that are not contiguous, positions that count tokens seen, not rows."""
    model = tiny_model(family)
    cache = make_prompt_cache(model, "snapkv(budget=40, window=8)")
    compressed = [i for i, layer in enumerate(cache) if layer.__class__.__name__ == "CompressedKVCache"]
    masked = own_prompt_cache(model)
    assert compressed == [i for i, layer in enumerate(masked) if type(layer) is KVCache]
    for i in compressed:
        masked[i] = MaskedCache(lambda seen: 40, window=8)
    for seed, chunks in enumerate(TURNS):
        got, expected = logits(model, cache, chunks, seed), logits(model, masked, chunks, seed)
        # float32 logits of the order of 1 to 10 through several layers; a wrong row or position moves them by 0.1
        np.testing.assert_allclose(got, expected, atol=2e-3, err_msg=f"turn {seed}")
    for i in compressed:
        assert cache[i].offset == sum(map(sum, TURNS))
        assert cache[i].store.lengths == [40 + 3]
        assert masked[i].visible.sum(axis=1).tolist() == [43] * masked[i].visible.shape[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_logits_of_the_prompt_are_the_full_cache_s(family):
    model = tiny_model(family)
    chunks = [50, 69, 1]
    got = logits(model, make_prompt_cache(model, "snapkv(budget=40, window=8)"), chunks)
    assert same_bits(got, logits(model, own_prompt_cache(model), chunks))


def test_offset_counts_tokens_seen():
    """Field report 36."""
    cache = new_cache("snapkv(budget=40)")
    feed(cache, random_tokens(0, 100), [99, 1])
    assert (cache.offset, cache.store.lengths) == (100, [40])
    step(cache, random_tokens(1, 1))
    assert (cache.offset, cache.store.lengths) == (101, [41])


@pytest.mark.parametrize("chunks", [(299,), (128, 128, 43), (2,) * 148 + (3,), (290, 9), (33, 200, 66)])
def test_any_chunking_keeps_the_same_rows(chunks):
    tokens, whole, parts = random_tokens(0, 300), new_cache("snapkv(budget=64)"), new_cache("snapkv(budget=64)")
    feed(whole, tokens, [299, 1])
    feed(parts, tokens, [*chunks, 1])
    assert contents(parts.store) == contents(whole.store)


def test_budget_holds_after_every_chunk():
    """Field report 37: 4,096 tokens in chunks of 512 under a budget of 256."""
    tokens, cache = random_tokens(0, 4096), new_cache("snapkv(budget=256, sinks=4, every_chunk=True)")
    most = 0
    for first in range(0, 4096, 512):
        step(cache, tokens[first : first + 512])
        assert cache.store.lengths == [256]
        most = max(most, cache.nbytes)
    first_rows = held_keys(cache)[0][:, :4]
    np.testing.assert_array_equal(first_rows, np.array(tokens.keys[0, :, :4]))
    step(cache, random_tokens(1, 1))
    assert cache.store.lengths == [256]


def test_a_budget_larger_than_the_prompt_changes_nothing():
    for spec in ("snapkv(budget=300)", "snapkv(budget=300, every_chunk=True)"):
        cache, dense = new_cache(spec), new_cache("dense")
        for seed, chunks in enumerate(([150, 99, 1], [1] * 20, [20, 1])):
            tokens = random_tokens(seed, sum(chunks))
            assert same_bits(feed(cache, tokens, chunks), feed(dense, tokens, chunks))
        assert contents(cache.store) == contents(dense.store)


def test_a_second_turn_selects_anew_within_budget():
    cache = new_cache("snapkv(budget=64, window=16)")
    feed(cache, random_tokens(0, 200), [199, 1])
    before = held_keys(cache)[0]
    feed(cache, random_tokens(1, 30), [1] * 30)
    assert cache.store.lengths == [94]
    second = random_tokens(2, 100)
    feed(cache, second, [99, 1])
    assert cache.store.lengths == [64]
    after = held_keys(cache)[0]
    np.testing.assert_array_equal(after[:, -16:], np.array(second.keys[0, :, -16:]))
    old = {row.tobytes() for row in before[0]}
    new = {row.tobytes() for row in np.array(second.keys[0, 0])}
    kept = {row.tobytes() for row in after[0]}
    assert kept & old  # the new prompt's queries chose among both
    assert (kept & new) - {row.tobytes() for row in after[0, -16:]}


def test_a_short_second_prompt_votes_with_its_own_queries():
    """The queries of the first prompt stood before the answer, so they would see rows from their future."""
    caches = [new_cache("snapkv(budget=64)") for _ in range(2)]
    for seed, cache in enumerate(caches):
        first = random_tokens(0, 200)
        queries = random_tokens(seed, 200).queries
        feed(cache, type(first)(queries, first.keys, first.values)[:60], [59, 1])  # fits into the budget
        feed(cache, random_tokens(2, 20), [1] * 20)
        feed(cache, random_tokens(3, 6), [5, 1])
    assert caches[0].store.lengths == [64]
    assert contents(caches[0].store) == contents(caches[1].store)


def test_the_kept_rows_follow_the_queries():
    tokens, other = random_tokens(0, 300), random_tokens(1, 300)

    def with_queries(before, window):
        queries = mx.concatenate([before.queries[:, :, :-32], window.queries[:, :, -32:]], axis=2)
        return type(tokens)(queries, tokens.keys, tokens.values)

    changed, early = with_queries(tokens, other), with_queries(other, tokens)
    kept = []
    for each in (tokens, changed, early):
        cache = new_cache("snapkv(budget=64)")
        feed(cache, each, [200, 80, 19, 1])
        kept.append(contents(cache.store))
    assert kept[0] != kept[1]  # the window's queries
    assert kept[0] == kept[2]  # no others


def test_a_share_of_the_tokens_seen():
    cache = new_cache("snapkv(budget=0.25)")
    feed(cache, random_tokens(0, 400), [399, 1])
    assert cache.store.lengths == [100]
    feed(cache, random_tokens(1, 200), [199, 1])
    assert cache.store.lengths == [150]
    tiny = new_cache("snapkv(budget=0.25)")
    feed(tiny, random_tokens(0, 100), [99, 1])
    assert tiny.store.lengths == [32]  # never less than the window


def test_a_long_answer_is_bounded():
    cache = new_cache("snapkv(budget=64, decode_budget=48, interval=10)")
    feed(cache, random_tokens(0, 200), [199, 1])
    held = []
    for seed in range(45):
        step(cache, random_tokens(seed, 1))
        held.append(cache.store.lengths[0])
    assert held[:9] == list(range(65, 74))
    assert held[9::10] == [48] * 4
    assert max(held[9:]) == 57
    newest = random_tokens(44, 1).keys
    np.testing.assert_array_equal(held_keys(cache)[0][:, -1], np.array(newest[0, :, 0]))


def test_a_step_without_a_token_is_no_step_of_the_interval():
    """The shorter prompt's sequence waits for six steps between its tokens."""
    spec, prompts = (
        "snapkv(budget=32, window=8, decode_budget=24, interval=5)",
        [random_tokens(i, 70 - 6 * i) for i in range(2)],
    )
    batch, alone = type(new_cache(spec)).merge([new_cache(spec) for _ in prompts]), new_cache(spec)
    batch.prepare(lengths=[70, 64], right_padding=[0, 6])
    padded = pad(prompts)
    for first, last in [(0, 60), *((i, i + 1) for i in range(60, 70))]:
        step(batch, padded[first:last])
    batch.finalize()
    feed(alone, prompts[1], [60, 1, 1, 1, 1])
    for i in range(4):
        assert batch.store.lengths[1] == alone.store.lengths[0]
        step(batch, pad([random_tokens(i, 1)] * 2))
        step(alone, random_tokens(i, 1))
    assert alone.store.lengths == [26]  # brought to 24 at the second of these tokens
    np.testing.assert_array_equal(held_keys(batch)[1], held_keys(alone)[0])


def test_sequences_of_a_batch_select_on_their_own():
    """One prompt fits into the budget, two do not, in chunks that pad them."""
    lengths, spec = [30, 200, 120], "snapkv(budget=64)"
    prompts, answers = (
        [random_tokens(i, n) for i, n in enumerate(lengths)],
        [random_tokens(9 + i, 12) for i in range(3)],
    )
    solos = [new_cache(spec) for _ in lengths]
    expected = []
    for cache, prompt, answer in zip(solos, prompts, answers, strict=True):
        feed(cache, prompt, [prompt.count - 1, 1])
        expected.append(feed(cache, answer, [1] * 12))
    batch = type(solos[0]).merge([new_cache(spec) for _ in lengths])
    batch.prepare(lengths=[n - 1 for n in lengths], right_padding=[199 - (n - 1) for n in lengths])
    step(batch, pad([prompt[: prompt.count - 1] for prompt in prompts]))
    batch.finalize()
    step(batch, pad([prompt[prompt.count - 1 :] for prompt in prompts]))
    assert batch.store.lengths == [30, 64, 64]
    got = feed(batch, pad(answers), [1] * 12)
    for b in range(3):
        # another order of float32 sums in attention over a padded batch
        np.testing.assert_allclose(got[b], expected[b][0], atol=1e-5)
    assert contents(batch.store) == contents_of(solos)
    assert contents(batch.extract(1).store) == contents(solos[1].store)


def contents_of(caches):
    return [held for cache in caches for held in contents(cache.store)]


def test_bytes_held_after_a_long_prompt():
    gc.collect()
    mx.clear_cache()
    tokens, cache = random_tokens(0, 8192), new_cache("snapkv(budget=512)")
    mx.eval(tokens.queries, tokens.keys, tokens.values)
    before = mx.get_active_memory()
    output = feed(cache, tokens, [2048, 2048, 2048, 2047, 1])
    del output
    gc.collect()
    assert cache.nbytes == pytest.approx(512 * ROW, rel=0.02)
    # allocations are rounded up to pages
    assert mx.get_active_memory() - before == pytest.approx(512 * ROW, rel=0.02, abs=3 * 16384)


def test_every_chunk_bounds_the_peak_of_keys_and_values():
    tokens, peaks = random_tokens(0, 8192), {}
    for spec in ("dense", "snapkv(budget=512, every_chunk=True)"):
        cache, peaks[spec] = new_cache(spec), 0
        append = cache.store.append

        def watched(*args, append=append, cache=cache, spec=spec):
            append(*args)
            peaks[spec] = max(peaks[spec], cache.nbytes)

        cache.store.append = watched
        feed(cache, tokens, [1024] * 8)
    assert peaks["snapkv(budget=512, every_chunk=True)"] <= peaks["dense"] / 2


def test_bytes_scale_with_kv_heads():
    """Field report 39: rows are stored once per KV head, not once per query head."""
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "snapkv(budget=64, window=8)")
    own = own_prompt_cache(model)
    for each in (cache, own):
        logits(model, each, [255, 1])
    for layer, full in zip(memory_report(cache).layers, own, strict=True):
        assert layer.rows == 64
        assert layer.bytes_held == full.nbytes * 64 // 256


def test_taking_tokens_back_is_refused():
    cache = new_cache("snapkv(budget=64)")
    assert not cache.is_trimmable()
    feed(cache, random_tokens(0, 20))
    with pytest.raises(ValueError, match="take back at most 0 tokens"):
        cache.trim(1)
