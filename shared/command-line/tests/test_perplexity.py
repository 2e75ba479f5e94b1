import math
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import install, make_prompt_cache
from mlx_kv_cli import lm
from mlx_kv_cli.perplexity import FULL, _spans, perplexities, perplexity

TOKENS = np.random.default_rng(0).integers(0, 128, 257).tolist()  # 256 fill mlx-lm's first allocation


def log_softmax(logits: mx.array) -> np.ndarray:
    values = np.array(logits.astype(mx.float32)).astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def test_full_cache_equals_one_pass_without_a_cache(tiny):
    result = perplexity(tiny, TOKENS, lambda: lm.full_cache(tiny), prefill=64, chunk=7)
    log_p = log_softmax(tiny(mx.array(TOKENS)[None])[0])
    nll = -log_p[np.arange(63, 256), TOKENS[64:]]
    # float32 logits of size one, in another order of additions than the single pass.
    assert result.mean_nll == pytest.approx(nll.mean(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    assert result.standard_error == pytest.approx(nll.std(ddof=1) / math.sqrt(len(nll)), rel=1e-4)
    assert result.tokens == len(nll) == 193
    assert (result.ratio, result.ratio_standard_error, result.kl_divergence, result.top1_agreement) == (1, 0, 0, 1)


def test_a_lossy_cache_against_numbers_worked_out_by_hand(tiny):
    def quantised():
        return lm.quantized_cache(tiny, bits=2, group_size=32)

    result = perplexity(tiny, TOKENS, quantised, prefill=64, chunk=16)
    cache, rows, ids = quantised(), [], mx.array(TOKENS)[None]
    for start, end in [(0, 63), (63, 64), *((start, start + 16) for start in range(64, 256, 16))]:
        rows.append(log_softmax(tiny(ids[:, start:end], cache=cache)[0]))
    log_q = np.concatenate(rows)[63:]
    log_p = log_softmax(tiny(ids)[0])[63:256]
    targets = (np.arange(193), TOKENS[64:])
    difference = log_p[targets] - log_q[targets]
    assert abs(difference.mean()) > 1e-4  # two bits do change this model, or nothing would be tested
    # The same float32 forwards; only the statistics are computed differently.
    assert result.mean_nll == pytest.approx(-log_q[targets].mean(), rel=1e-5)
    assert result.ratio == pytest.approx(math.exp(difference.mean()), rel=1e-5)
    expected = math.exp(difference.mean()) * difference.std(ddof=1) / math.sqrt(193)
    assert result.ratio_standard_error == pytest.approx(expected, rel=1e-2)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    # Both passes differ from the measured one by rounding of 1e-6 a token, against a KL of that size squared.
    assert result.kl_divergence == pytest.approx(kl, rel=1e-2, abs=1e-6)
    assert result.top1_agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).mean(), abs=1.5 / 193)
    assert result.bytes_held == sum(layer.nbytes for layer in cache)
    # Two layers, keys and values, one head of 32, 256 tokens fed, two bytes a number.
    assert result.fp16_bytes == 2 * 2 * 32 * 256 * 2


def test_several_caches_in_one_pass_equal_one_at_a_time(tiny, monkeypatch):
    factories = {"a": lambda: make_prompt_cache(tiny, "dense"), "b": lambda: lm.quantized_cache(tiny, 4, 32)}
    seen = []
    together = perplexities(tiny, TOKENS, factories, 64, 32, lambda *step: seen.append(step))
    assert list(together) == [FULL, "a", "b"]
    monkeypatch.setattr("mlx_kv_cli.together.can_go_together", lambda caches: False)
    for name, factory in factories.items():
        alone = perplexity(tiny, TOKENS, factory, 64, 32)
        # The same float32 products, of more rows at a time: what a KL divergence of 1e-6 is made of as well.
        assert asdict(together[name]) == pytest.approx(asdict(alone), rel=1e-4, abs=1e-6)
    assert together["a"].ratio == pytest.approx(1, abs=1e-5)  # the same float32 attention, another call
    assert seen[-1] == (256, 256)


@pytest.mark.parametrize("prefill", [2, 3, 2049, 2050, 5000])
@pytest.mark.parametrize("chunk", [1, 32, 4096])
@pytest.mark.parametrize("rest", [2, 33, 100])
def test_spans_cover_all_but_the_last_token_and_end_the_prompt_with_one_alone(prefill, chunk, rest):
    spans = list(_spans(prefill + rest, prefill, chunk))
    assert [position for start, end in spans for position in range(start, end)] == list(range(prefill + rest - 1))
    assert (prefill - 1, prefill) in spans
    assert all(0 < end - start <= (2048 if end <= prefill else chunk) for start, end in spans)


@pytest.mark.parametrize(("prefill", "chunk", "count"), [(1, 32, 100), (64, 0, 100), (64, 32, 65), (64, 32, 0)])
def test_bad_requests_are_refused(tiny, prefill, chunk, count):
    with pytest.raises(ValueError, match=r"^\[perplexity\] expected"):
        perplexity(tiny, TOKENS[:count], lambda: lm.full_cache(tiny), prefill, chunk)


def test_an_installed_method_cannot_pass_for_the_full_cache(tiny):
    undo = install(tiny, "dense")
    with pytest.raises(ValueError, match=r"undo mlx_kv\.install"):
        perplexity(tiny, TOKENS, list, 64, 32)
    undo()
    assert perplexity(tiny, TOKENS, lambda: lm.full_cache(tiny), 64, 32).ratio == 1


def test_real_text_through_the_dense_store(smollm2):
    from mlx_kv_cli.texts import read_text

    ids = smollm2.tokenizer.encode(read_text("typesseq"))[:320]
    result = perplexity(smollm2.model, ids, lambda: make_prompt_cache(smollm2.model, "dense"), 256)
    # Plain English documentation: a working model is far below 50 a token, a broken one at its 49,152 words.
    assert 2 < result.full_perplexity < 50
    assert result.ratio == pytest.approx(1, abs=1e-3)  # float32 rounding through 30 layers
    assert result.top1_agreement > 0.98
