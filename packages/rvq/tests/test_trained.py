"""Trained codebooks: the paper's worked examples, fitting, files, and who may use them."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import Geometry, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_kv.identity import fingerprint
from mlx_kv.testing import CHECKS, check_name, tiny_model
from mlx_kv.testing.driving import GEOMETRY, contents, random_tokens, reachable_arrays
from mlx_kv_rvq import TrainedRvq
from mlx_kv_rvq.fit import Averages, fit_codebooks, update
from mlx_kv_rvq.trained import TrainedCodec, grouped, nearest, ungrouped

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
ALONE = ("new_rows_are_exact", "take", "bytes_follow_length")  # checks without a model


def case(name):
    return GOLDEN[name]["inputs"], GOLDEN[name]["expected"]


def test_each_stage_takes_the_nearest_entry():
    given, expected = case("rvq_encode_two_stage")
    books = mx.array(given["codebooks"])
    codes = nearest(mx.array(given["x"])[None], books)
    assert codes.tolist() == [[index] for index in expected["indices"]]
    left, norms = np.array(given["x"]), []
    for book, index in zip(given["codebooks"], expected["indices"], strict=True):
        norms.append(float(left @ left))
        left = left - np.array(book[index])
    assert [*norms, float(left @ left)] == expected["sq_residual_norms"]
    # A tie goes to the lowest index.
    assert nearest(mx.zeros((1, 2)), mx.array([[[1.0, 0.0], [0.0, 1.0]]])).tolist() == [[0]]


def test_channels_of_a_group():
    given, expected = case("rvq_key_channel_grouping")
    channels = mx.arange(given["head_dim"])
    for side, strided in (("key_groups", True), ("value_groups", False)):
        groups = grouped(channels, given["group_dim"], strided)
        assert groups.tolist() == expected[side]
        assert ungrouped(groups, strided).tolist() == channels.tolist()


def test_moving_averages():
    given, expected = case("rvq_ema_update")
    before = Averages(mx.array(given["cluster_size"]), mx.array(given["embed_sum"]))
    after = update(before, mx.array(given["x"]), mx.array(given["assign"]), given["decay"])
    assert after.counts.tolist() == expected["cluster_size"]
    assert after.total.tolist() == expected["embed_sum"]
    assert np.allclose(np.array(after.codebook()), expected["codebook"], rtol=1e-6)


def test_a_row_s_bytes():
    """The paper's 2.875 bits count codes alone: ours are a byte each, and two for the deviation."""
    given, expected = case("rvq_bits")
    assert given["K"] * 11 / given["group_dim"] + 16 / given["head_dim"] == expected["bits_per_channel"]
    codec = TrainedCodec(mx.random.normal((8, 256, 32)), 128, strided=True)
    encoded = codec.encode(mx.random.normal((1, 2, 5, 128)), ())
    assert (encoded.codes.nbytes + encoded.norm.nbytes) / (2 * 5) == 8 * 128 / 32 + 2  # 2.125 bits a channel


def test_fitting_beats_other_entries_of_the_data():
    """Moving averages end below the error of entries drawn from the rows, and each stage lowers it."""
    mixed = mx.random.normal((32, 64), key=mx.random.key(0)) @ mx.random.normal((64, 64), key=mx.random.key(1))
    rows = mx.random.normal((1500, 32), key=mx.random.key(2)) @ mixed
    books = fit_codebooks(rows[:1000], True, stages=6, entries=64)

    def error(books):
        codec = TrainedCodec(books, 64, strided=True)
        left = codec.decode(codec.encode(rows[None, None, 1000:], ()), 64, mx.float32) - rows[1000:]
        return float((left**2).mean() / (rows[1000:] ** 2).mean())

    sigma = mx.std(rows, axis=-1, keepdims=True, ddof=1)
    drawn = grouped(rows[:64] / sigma[:64], 32, True).reshape(-1, 32)[:64]
    errors = [error(books[:stages]) for stages in (2, 4, 6)]
    assert errors[0] < 0.9 * error(mx.stack([drawn, 0.5 * drawn]))
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize(("rows", "message"), [((600, 48), "divisible by 32, got 48"), ((3, 64), "at least 256")])
def test_rows_that_cannot_be_fitted(rows, message):
    with pytest.raises(ValueError, match=rf"\[trained_rvq\] expected .*{message}"):
        fit_codebooks(mx.zeros(rows), True)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """Codebooks for every layer of the tiny model, fitted to what it makes of random tokens."""
    cache = make_prompt_cache(model, "dense")
    mx.eval(model(mx.random.randint(0, 128, (1, 200), key=mx.random.key(0)), cache=cache))
    rows = {i: layer.keys_and_values() for i, layer in enumerate(cache)}
    target = str(tmp_path_factory.mktemp("books") / "tiny.safetensors")
    nbytes = TrainedRvq.fit(rows, fingerprint(model), target)
    assert nbytes == len(rows) * 2 * 8 * 256 * 32 * 2
    return target


@pytest.mark.parametrize("check", [c for c in CHECKS if check_name(c) in ALONE], ids=check_name)
def test_conformance_of_the_store(check, file):
    check(f"trained_rvq(codebooks={file!r}, residual=32)")


def test_chunks_do_not_matter(file):
    """Nearly equidistant entries must not be decided by how many rows are encoded together."""
    tokens = random_tokens(0, 130)
    held = []
    for chunks in ((130,), (97, 1, 32), (60, *(1,) * 10, 60)):
        store, done = TrainedRvq(file, residual=32).create(GEOMETRY), 0
        for n in chunks:
            rows = slice(done, done + n)
            store.append(tokens.keys[:, :, rows], tokens.values[:, :, rows])
            store.settle()
            done += n
        held.append(contents(store))
    assert held[1] == held[0]
    assert held[2] == held[0]


def test_codebooks_count_as_bytes_held(model, file):
    cache = make_prompt_cache(model, f"trained_rvq(codebooks={file!r}, residual=32)")
    mx.eval(model(mx.random.randint(0, 128, (1, 100)), cache=cache))
    for layer in cache:
        assert layer.nbytes == sum(array.nbytes for array in reachable_arrays(layer)) > 2 * 8 * 256 * 32 * 2


def test_a_new_process_goes_on(model, file, tmp_path):
    """Codebooks and a cache over them, both loaded there, give the tokens that follow here."""
    spec = f"trained_rvq(codebooks={file!r}, residual=32)"
    cache = make_prompt_cache(model, spec)
    prompt = mx.random.randint(0, 128, (1, 150), key=mx.random.key(3))
    mx.eval(model(prompt, cache=cache))
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    code = (
        "import sys, mlx.core as mx\n"
        "from mlx_kv import load_prompt_cache\n"
        "from mlx_kv.testing import tiny_model\n"
        "model = tiny_model('llama')\n"
        "cache = load_prompt_cache(sys.argv[1], model, sys.argv[2])\n"
        "print(model(mx.array([[5]]), cache=cache)[0, -1].tolist())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache.safetensors"), spec]
    there = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert np.allclose(there, np.array(model(mx.array([[5]]), cache=cache)[0, -1]), atol=1e-5)  # another BLAS, perhaps


def test_another_model_s_codebooks_are_refused(file):
    other = tiny_model("llama", seed=1)
    with pytest.raises(ValueError, match=r"\[trained_rvq\] .*tiny.safetensors was fitted for another model"):
        make_prompt_cache(other, f"trained_rvq(codebooks={file!r})")


def test_files_that_do_not_fit(file, tmp_path):
    with pytest.raises(ValueError, match="expected codebooks for layer 7 with head dims"):
        TrainedRvq(file).create(Geometry(7, 4, 2, 64, 64))
    with pytest.raises(ValueError, match="expected a file that mlx_kv fit wrote, got 'nowhere', which is none"):
        TrainedRvq("nowhere").create(GEOMETRY)
    (tmp_path / "cut.safetensors").write_bytes(Path(file).read_bytes()[:5000])
    with pytest.raises(ValueError, match="is damaged or was not written by mlx_kv fit"):
        TrainedRvq(str(tmp_path / "cut.safetensors")).create(GEOMETRY)
    with pytest.raises(ValueError, match="expected codebooks, a file of mlx_kv fit, got none"):
        TrainedRvq()


def test_a_saved_cache_is_refused_once_its_codebooks_are_another_s(model, file, tmp_path):
    moving = tmp_path / "books.safetensors"
    moving.write_bytes(Path(file).read_bytes())
    cache = make_prompt_cache(model, f"trained_rvq(codebooks={str(moving)!r}, residual=32)")
    mx.eval(model(mx.random.randint(0, 128, (1, 100)), cache=cache))
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    rows = {0: (mx.random.normal((1, 2, 300, 64)), mx.random.normal((1, 2, 300, 64)))}
    TrainedRvq.fit(rows, "another", str(moving))
    with pytest.raises(ValueError, match="was fitted for another model"):
        load_prompt_cache(tmp_path / "cache.safetensors", model)
