"""Files that do not fit, whatever is done to them."""

import dataclasses
import json

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given, settings
from mlx_lm.models.cache import make_prompt_cache as make_own_cache

from mlx_kv import CacheFileError, Dense, load_prompt_cache, make_prompt_cache, persistence, save_prompt_cache
from mlx_kv.identity import fingerprint
from mlx_kv.testing import tiny_model
from mlx_kv.testing.generation import greedy, random_prompt


@pytest.fixture(scope="module")
def model():
    return tiny_model("gemma3_text")


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A small file with layers of ours and of mlx-lm's."""
    file = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache = make_prompt_cache(model, "dense")
    greedy(model, random_prompt(0, 20), cache, 3)
    save_prompt_cache(file, cache)
    return file


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_noticed(saved, model, data):
    whole = bytearray(saved.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Most draws among the first bytes: lengths, digest and description.
        place = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, len(whole) - 1)))
        whole[place] ^= data.draw(st.integers(1, 255))
    if bytes(whole) == saved.read_bytes():
        return
    damaged = saved.with_name("damaged.safetensors")
    damaged.write_bytes(whole)
    with pytest.raises(CacheFileError, match="damaged"):
        load_prompt_cache(damaged, model)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_missing_or_added_end_is_noticed(saved, model, data):
    whole = saved.read_bytes()
    size = data.draw(st.integers(0, len(whole) - 1))
    damaged = saved.with_name("damaged.safetensors")
    for content in (whole[:size], whole + whole[:1], whole + whole[: size + 1]):
        damaged.write_bytes(content)
        with pytest.raises(CacheFileError, match="damaged"):
            load_prompt_cache(damaged, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlx_kv": "1"}, "expected format 2, got 1"),
        ({"versions": json.dumps({"mlx-kv": "9.9"})}, r"expected a file of \{'mlx-kv': '\d+\.\d+'\}, got one of .*9.9"),
        ({"model": "0" * 32}, "was saved for another model"),
    ],
)
def test_a_whole_file_of_something_else_is_refused(saved, model, change, message):
    arrays, description = mx.load(str(saved), return_metadata=True)
    mx.eval(arrays)
    other = saved.with_name("other.safetensors")
    mx.save_safetensors(str(other), arrays, {**description, **change, "digest": persistence._NO_DIGEST})
    persistence._seal(other)
    with pytest.raises(CacheFileError, match=message):
        load_prompt_cache(other, model)


def test_a_model_with_other_weights_or_layers_is_refused(saved):
    for other in (tiny_model("gemma3_text", seed=1), tiny_model("gemma3_text", sliding_window=32)):
        with pytest.raises(CacheFileError, match="was saved for another model"):
            load_prompt_cache(saved, other)


def test_a_file_of_another_method_is_refused(saved, model, add_method):
    @dataclasses.dataclass(frozen=True)
    class Other(Dense):
        step: int = 2

    add_method("other", Other)
    with pytest.raises(CacheFileError, match=r"expected the method other\(step=3\), got dense"):
        load_prompt_cache(saved, model, "other(step=3)")


def test_files_of_mlx_lm_are_refused(model, tmp_path):
    from mlx_lm.models.cache import save_prompt_cache as save_own_cache

    cache = make_own_cache(model)
    greedy(model, [1, 2, 3], cache, 2)
    file = tmp_path / "own.safetensors"
    save_own_cache(str(file), cache)
    with pytest.raises(CacheFileError, match=r"damaged or was not written by mlx_kv.save_prompt_cache"):
        load_prompt_cache(file, model)
    with pytest.raises(ValueError, match=r"\[save_prompt_cache\] expected a cache made by mlx_kv.make_prompt_cache"):
        save_prompt_cache(tmp_path / "x.safetensors", cache)


def test_a_failed_save_leaves_the_old_file(saved, model, tmp_path, monkeypatch):
    file = tmp_path / "kept.safetensors"
    file.write_bytes(saved.read_bytes())
    cache = make_prompt_cache(model, "dense")
    greedy(model, [1, 2, 3], cache, 2)

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(persistence, "_seal", full)
    with pytest.raises(OSError, match="disk full"):
        save_prompt_cache(file, cache)
    assert file.read_bytes() == saved.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["kept.safetensors"]
    with pytest.raises(ValueError, match=r"expected a name ending in .safetensors, got 'kept.npz'"):
        save_prompt_cache(tmp_path / "kept.npz", cache)


def test_reasons_and_metadata_come_back(model, tmp_path):
    cache = make_prompt_cache(model, "dense", skip_layers=[1])
    greedy(model, random_prompt(0, 20), cache, 3)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, cache, {"chat": "42"})
    loaded, metadata = load_prompt_cache(file, model, "dense", return_metadata=True)
    assert metadata == {"chat": "42"}
    assert [type(c) for c in loaded] == [type(c) for c in cache]
    assert loaded[1].uncompressed_reason == "skipped on request"
    file.unlink()  # nothing may still read from it
    assert greedy(model, [5], loaded, 20) == greedy(model, [5], cache, 20)


def test_a_model_is_told_by_values_from_all_over_its_parameters():
    model, other = tiny_model("llama"), tiny_model("llama")
    projection = other.model.layers[1].self_attn.k_proj
    assert fingerprint(model) == fingerprint(other)
    projection.weight = mx.concatenate([projection.weight[:1], -projection.weight[1:]])
    assert fingerprint(model) != fingerprint(other)
