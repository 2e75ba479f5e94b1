"""Which layers the probe admits, and what it says of the others."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_kv import Geometry, UnsupportedModelError, install, make_prompt_cache, memory_report
from mlx_kv.probe import probe
from mlx_kv.testing import tiny_model
from mlx_kv.testing.baselines import LastRows
from mlx_kv.testing.generation import greedy, random_prompt
from mlx_kv.window import WindowOptions

THROUGH = "its attention does not go through mlx-lm's scaled_dot_product_attention"
CHANGES = "the model changes keys or values after the cache returned them"
SHARES = "it shares keys and values with another layer"
RING = "it uses a RotatingKVCache, which stays as it is"
STATE = "it uses a ArraysCache, which stays as it is"
YES = None
LAYERS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("llama", [YES, YES]),
        ("qwen2", [YES, YES]),
        ("qwen3", [YES, YES]),
        ("phi3", [YES, YES]),
        ("gemma3_text", [RING, YES, RING, YES]),
        ("gemma4_text", [RING, YES, RING, YES]),
        ("gemma3n", [RING, YES, RING, SHARES]),
        ("gpt_oss", [RING, YES]),
        ("qwen3_next", [STATE, YES, STATE, YES]),
    ],
)
def test_models_whose_layers_are_compressed(name, reasons):
    model = tiny_model(name)
    report = memory_report(make_prompt_cache(model, "dense"))
    assert [layer.reason for layer in report.layers] == reasons
    assert [layer.method for layer in report.layers] == ["dense" if reason is YES else None for reason in reasons]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", THROUGH),
        ("stablelm", CHANGES),
        ("plamo", CHANGES),
        ("deepseek_v3", CHANGES),
        ("mamba2", STATE),
    ],
)
def test_models_without_such_a_layer_are_refused(name, reason):
    with pytest.raises(UnsupportedModelError) as caught:
        make_prompt_cache(tiny_model(name), "dense")
    assert str(caught.value) == f"[mlx_kv] no layer of mlx_lm.models.{name} can be compressed: layers 0-1: {reason}"


def test_a_layer_whose_keys_another_uses_without_a_cache():
    """Layers 2 and 3 have no cache of their own: they attend to what layers 0 and 1 were given back by theirs."""
    model = tiny_model("gemma4_text", num_kv_shared_layers=2)
    with pytest.raises(UnsupportedModelError, match=SHARES):
        make_prompt_cache(model, "dense")


@dataclass(frozen=True)
class Evicting:
    """A method that drops rows."""

    kind: ClassVar[str] = "policy"

    def create(self, geometry):
        return LastRows(WindowOptions(budget=64, window=8))


def test_the_layers_that_nobody_else_uses_are_compressed(add_method):
    model = tiny_model("gemma4_text", num_hidden_layers=5, num_kv_shared_layers=1, layer_types=LAYERS)
    cache = make_prompt_cache(model, "dense")
    assert [layer.reason for layer in memory_report(cache).layers] == [YES, RING, SHARES, RING]
    prompt = random_prompt(0, 100)
    assert greedy(model, prompt, cache, 20) == greedy(model, prompt, model.make_cache(), 20)
    add_method("evicting", Evicting)
    with pytest.raises(UnsupportedModelError, match="shares keys and values"):
        make_prompt_cache(model, "evicting")


def test_the_shape_is_what_the_layer_calls_with():
    model = tiny_model("gemma4_text")
    layers = probe(model, model.make_cache())
    assert layers[1].geometry == Geometry(layer=1, query_heads=4, kv_heads=2, key_dim=64, value_dim=64)
    assert layers[0].geometry is None


class Layered(nn.Module):
    """A model of two layers, the first plain; `second(self, x, cache)` is the other's attention."""

    def __init__(self, second, own=KVCache):
        super().__init__()
        self.second = second
        self.layers = [None, None]
        self.own = own

    def make_cache(self):
        return [KVCache(), self.own()]

    def __call__(self, tokens, cache):
        x = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (1, 2, tokens.shape[1], 32))
        mask = base.create_attention_mask(x[:, 0], cache[0])
        k, v = cache[0].update_and_fetch(x, x)
        x = base.scaled_dot_product_attention(x, k, v, cache=cache[0], scale=1.0, mask=mask)
        return self.second(x, cache, mask)


def no_seam(x, cache, mask):
    k, v = cache[1].update_and_fetch(x, x)
    return mx.fast.scaled_dot_product_attention(x, k, v, scale=1.0)


def changed(x, cache, mask):
    k, v = cache[1].update_and_fetch(x, x)
    return base.scaled_dot_product_attention(x, k, v * 2, cache=cache[1], scale=1.0, mask=mask)


def additive(x, cache, mask):
    k, v = cache[1].update_and_fetch(x, x)
    return base.scaled_dot_product_attention(x, k, v, cache=cache[1], scale=1.0, mask=mx.zeros((1, k.shape[2])))


def windowed(x, cache, mask):
    mask = base.create_attention_mask(x[:, 0], cache[1], window_size=2, return_array=True)
    k, v = cache[1].update_and_fetch(x, x)
    return base.scaled_dot_product_attention(x, k, v, cache=cache[1], scale=1.0, mask=mask)


def foreign_mask(x, cache, mask):
    k, v = cache[1].update_and_fetch(x, x)
    rows = mx.arange(k.shape[2]) >= 0
    return base.scaled_dot_product_attention(x, k, v, cache=cache[1], scale=1.0, mask=rows)


def without_appending(x, cache, mask):
    return base.scaled_dot_product_attention(x, x, x, cache=cache[1], scale=1.0, mask=None)


def another_layers_rows(x, cache, mask):
    k, v = cache[0].keys_and_values()
    return base.scaled_dot_product_attention(x, k, v, cache=cache[0], scale=1.0, mask=None)


def unused(x, cache, mask):
    return x


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (no_seam, THROUGH),
        (changed, CHANGES),
        (additive, "its attention has an additive mask"),
        (windowed, "its mask is not the cache's own causal mask (a sliding window, for example)"),
        (foreign_mask, "its mask is not the cache's own causal mask (a sliding window, for example)"),
        (without_appending, "it attends without appending to its cache"),
        (unused, "the model does not use its cache"),
    ],
)
def test_each_reason_leaves_the_layer_as_it_is(second, reason):
    model = Layered(second)
    cache = make_prompt_cache(model, "dense")
    assert [layer.reason for layer in memory_report(cache).layers] == [None, reason]
    assert type(cache[1]) is KVCache
    model(mx.array([[1, 2, 3]]), cache)  # and the model runs with it


def test_a_layer_whose_rows_another_uses_is_left_as_it_is():
    with pytest.raises(UnsupportedModelError, match="layers 0: it shares keys and values with another layer"):
        make_prompt_cache(Layered(another_layers_rows), "dense")


def test_a_ring_buffer_stays():
    cache = make_prompt_cache(Layered(unused, own=lambda: RotatingKVCache(8)), "dense")
    assert memory_report(cache).layers[1].reason == RING


def test_a_forward_pass_that_fails_is_named_as_the_models():
    def fails(x, cache, mask):
        raise KeyError("rope")

    with pytest.raises(UnsupportedModelError, match=r"failed while it was being probed: KeyError\('rope'\)"):
        make_prompt_cache(Layered(fails), "dense")


def test_layers_are_skipped_on_request():
    model = tiny_model("gemma3_text")
    layers = memory_report(make_prompt_cache(model, "dense", skip_layers=[-1])).layers
    assert [layer.reason for layer in layers] == [RING, None, RING, "skipped on request"]
    for wrong in (4, -5):
        with pytest.raises(ValueError, match=rf"\[mlx_kv\] expected skip_layers between -4 and 3, got {wrong}"):
            make_prompt_cache(model, "dense", skip_layers=[wrong])


def test_an_installed_model_is_probed_with_its_own_caches():
    model = tiny_model("gemma3_text")
    undo = install(model, "dense")
    assert memory_report(make_prompt_cache(model, "dense")).layers[0].reason == RING
    undo()
    assert type(model.make_cache()[1]) is KVCache


def test_what_an_untouched_layer_holds():
    """mlx-lm allocates 256 rows at a time: held, but no tokens that fp16 would have to hold as well."""
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "dense", skip_layers=[0])
    model(mx.array([list(range(100))]), cache=cache)
    own, ours = memory_report(cache).layers
    assert own.rows == ours.rows == 100
    assert own.bytes_held == cache[0].nbytes == 256 * own.fp16_bytes * 2 // 100  # float32
    assert own.fp16_bytes == ours.fp16_bytes
    assert memory_report(make_prompt_cache(model, "dense", skip_layers=[0])).layers[0].bytes_held == 0
