"""Several caches in one forward pass."""

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_kv import CompressedKVCache, DenseStore, make_prompt_cache
from mlx_kv.testing.baselines import LastRows
from mlx_kv.window import WindowOptions
from mlx_kv_cli import lm
from mlx_kv_cli.together import can_go_together, starts_exactly, together

TOKENS = mx.random.randint(0, 128, (1, 90), key=mx.random.key(0))


def caches(model):
    """Four that hold different rows of the same text."""
    evicting = [CompressedKVCache(LastRows(WindowOptions(budget=20, window=8)), DenseStore()) for _ in model.layers]
    return [lm.full_cache(model), make_prompt_cache(model, "dense"), evicting, lm.quantized_cache(model, 2, 32)]


def test_every_sequence_attends_through_its_own_cache(tiny):
    alone, joint = caches(tiny), together(caches(tiny))
    for start, end in [(0, 60), (60, 61), (61, 80), (80, 90)]:
        piece = TOKENS[:, start:end]
        got = lm.logits(tiny, mx.repeat(piece, 4, axis=0), joint)
        right = mx.concatenate([lm.logits(tiny, piece, cache) for cache in alone])
        assert mx.allclose(got, right, rtol=0, atol=1e-5)  # logits of size one, sums in another order
    assert float(mx.abs(right[0] - right[2]).max()) > 1e-3  # or it would not matter whose rows are read
    assert [layer.offset for layer in joint] == [90, 90]


def test_a_single_sequence_fills_every_cache(tiny):
    alone, several = caches(tiny)[:3], caches(tiny)[:3]
    assert list(map(starts_exactly, caches(tiny))) == [True, True, True, False]
    lm.feed(tiny, TOKENS[:, :60], together(several))
    for cache, right in zip(several, alone, strict=True):
        lm.feed(tiny, TOKENS[:, :60], right)
        got = lm.logits(tiny, TOKENS[:, 60:70], cache)
        assert mx.allclose(got, lm.logits(tiny, TOKENS[:, 60:70], right), rtol=0, atol=1e-5)


def test_which_caches_go_together(tiny):
    full, dense, _, quantised = caches(tiny)
    assert can_go_together([full, dense, quantised])
    # Nothing is known of how this model attends.
    assert not can_go_together([full, quantised])
    # Neither its mask nor what it returns are those of a cache that holds all tokens.
    assert not can_go_together([full, dense, [RotatingKVCache(max_size=32) for _ in full]])


def test_layers_left_uncompressed_go_alone(tiny):
    skipping = make_prompt_cache(tiny, "dense", skip_layers=[0])
    assert not can_go_together([lm.full_cache(tiny), skipping])
    assert can_go_together([lm.full_cache(tiny), skipping, make_prompt_cache(tiny, "dense")])
