"""What an RVQ store holds: which rows exactly, how many bytes, and what eviction leaves."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_kv import Geometry, make_prompt_cache, memory_report, save_prompt_cache
from mlx_kv.cache import CompressedKVCache
from mlx_kv.errors import CacheFileError
from mlx_kv.persistence import load_prompt_cache
from mlx_kv.policy import Policy
from mlx_kv.testing import tiny_model
from mlx_kv.testing.driving import GEOMETRY, contents, random_tokens, reachable_arrays, same_bits
from mlx_kv_kernels.testing import legs
from mlx_kv_rvq import Rvq, RvqStore


def filled(config, n, heads=2, dim=64, dtype=mx.float16, seed=1):
    store = RvqStore(config)
    store.append(*(mx.random.normal((1, heads, n, dim), dtype, key=mx.random.key(seed + i)) for i in range(2)))
    store.settle()
    mx.eval(store.arrays())
    return store


class Evicting(Policy):
    evicts = True


class EvictingEveryStep(Evicting):
    evicts_while_decoding = True


OUT_OF_RANGE = {
    "key_bits": 0,
    "value_bits": 5,
    "stages": 4,
    "residual": -1,
    "sinks": 128,
    "seed": -1,
    "rollback": True,
    "center": 1,
    "unbiased": 1,
}


@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_options_out_of_range(option):
    with pytest.raises(ValueError, match=rf"\[rvq\] expected {option} .*, got"):
        Rvq(**{option: OUT_OF_RANGE[option]})


def test_norms_are_unbiased_where_keys_are_centred():
    for config, unbiased in (
        (Rvq(), True),
        (Rvq(center=False), False),
        (Rvq(unbiased=False), False),
        (Rvq(center=False, unbiased=True), True),
    ):
        assert [codec.unbiased for codec in config.codecs()] == [unbiased] * 2


@pytest.mark.parametrize("dims", [(72, 64), (64, 160), (512, 512)])
def test_head_dims_are_refused_at_construction(dims):
    with pytest.raises(ValueError, match=r"\[rvq\] expected head_dim in \(64, 80, 96, 112, 128, 192, 256\), got"):
        Rvq().create(Geometry(0, 4, 2, *dims))


def test_the_newest_and_the_first_rows_are_exact_at_every_length():
    """Keys wait for whole blocks of 128 beyond the newest 40, values for 32."""
    config = Rvq(residual=32, sinks=3, rollback=8)
    store, tokens = RvqStore(config), random_tokens(0, 300)
    for n in range(1, 301):
        store.append(tokens.keys[:, :, n - 1 : n], tokens.values[:, :, n - 1 : n])
        store.settle()
        if n % 7 and n not in (71, 72, 167, 168, 296):
            continue
        due = max(0, n - 40)
        for read, exact, packed in zip(
            store.dense(), (tokens.keys, tokens.values), (due // 128 * 128, due // 32 * 32), strict=True
        ):
            assert read.shape[2] == n
            assert same_bits(read[:, :, packed:], exact[:, :, packed:n])
            assert same_bits(read[:, :, :3], exact[:, :, : min(3, n)])
            assert (mx.abs(read - exact[:, :, :n])[:, :, 3:packed].max(axis=(0, 1, 3)) > 0).all()


def test_bytes_of_a_row_pair():
    """D = 128, 2 bits, nothing exact: 68 bytes against 512."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    store = filled(Rvq(residual=0, sinks=0, center=False), 4096, heads=2, dim=128)
    assert store.nbytes == 2 * 4096 * 68
    gc.collect()
    assert store.nbytes == sum(array.nbytes for array in reachable_arrays(store))
    assert abs(mx.get_active_memory() - before - store.nbytes) <= 0.05 * store.nbytes


@settings(max_examples=25, deadline=None)
@given(
    key_bits=st.integers(1, 4),
    value_bits=st.integers(1, 4),
    stages=st.integers(1, 3),
    dim=st.sampled_from([64, 80]),
    residual=st.sampled_from([0, 32, 128]),
    reach=st.sampled_from([0, 5]),
    center=st.booleans(),
    n=st.integers(1, 700),
)
def test_bytes_follow_the_formula(key_bits, value_bits, stages, dim, residual, reach, center, n):
    config = Rvq(key_bits, value_bits, stages, residual, sinks=0, rollback=reach, center=center)
    store = filled(config, n, heads=1, dim=dim)
    due = max(0, n - residual - reach)
    packed = {"keys": due // 128 * 128 if center else due // 32 * 32, "values": due // 32 * 32}
    right = 0
    for (side, rows), bits in zip(packed.items(), (key_bits, value_bits), strict=True):
        right += rows * (stages * -(-dim * bits // 32) * 4 + 2) + (n - rows) * dim * 2
        right += rows // 128 * dim * 2 if center and side == "keys" else 0
    held = sum(map(len, contents(store)[0].values()))
    # With rollback the tails also keep the rows that taking tokens back may have to unpack, a block of each side.
    again = (128 if center else 32) + 32 if reach else 0
    assert right <= held <= right + again * dim * 2


def test_the_report_tells_the_arrays_bytes():
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "rvq(residual=32)")
    mx.eval(model(mx.random.randint(0, 128, (1, 300)), cache=cache))
    report = memory_report(cache)
    assert report.bytes_held == sum(array.nbytes for layer in cache for array in layer.store.arrays().values())
    assert report.bytes_held < report.fp16_bytes


# ---- eviction


def test_centred_keys_refuse_eviction_while_decoding():
    with pytest.raises(
        ValueError, match=r"\[rvq\] expected center=False with a policy that evicts rows while decoding"
    ):
        CompressedKVCache(EvictingEveryStep(), RvqStore(Rvq()))
    CompressedKVCache(EvictingEveryStep(), RvqStore(Rvq(center=False)))
    CompressedKVCache(Evicting(), RvqStore(Rvq()))


def test_a_prompt_is_encoded_after_the_policy_has_chosen():
    """Nothing of a prompt is encoded before `take`; then what is kept is centred and encoded as if it were all."""
    store, tokens = RvqStore(Rvq(residual=32)), random_tokens(0, 400)
    store.accept(Evicting())
    store.append(tokens.keys, tokens.values)
    store.settle()
    assert same_bits(store.dense()[0], tokens.keys)
    store.append(tokens.keys[:, :, :1], tokens.values[:, :, :1])
    chosen = mx.array([[sorted({*range(h, 401, 2)})[:200] for h in range(2)]])
    store.take(chosen, [200])
    fresh = RvqStore(Rvq(residual=32))
    rows = (mx.concatenate([x, x[:, :, :1]], axis=2) for x in (tokens.keys, tokens.values))
    fresh.append(*(mx.take_along_axis(x, chosen[..., None], axis=2) for x in rows))
    fresh.settle()
    assert contents(store) == contents(fresh)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), sinks=st.sampled_from([0, 3]), residual=st.sampled_from([0, 8]))
def test_codes_of_evicted_steps_are_never_made_again(data, sinks, residual):
    """Rows are appended and one of each head dropped, step after step: each row kept reads as when it was encoded.

    That is the row itself, or its encoding if it is packed, whichever rows have gone since, and wherever it stands.
    """
    store = RvqStore(Rvq(residual=residual, sinks=sinks, center=False))
    steps, held = data.draw(st.integers(1, 12)), 40
    tokens = random_tokens(data.draw(st.integers(0, 99)), held + steps)
    store.append(tokens.keys[:, :, :held], tokens.values[:, :, :held])
    store.settle()
    codec = store.keys.codec
    encoded = codec.decode(codec.encode(tokens.keys, ()), 64, mx.float32)
    alive = [list(range(held)) for _ in range(2)]
    for step in range(steps):
        store.append(tokens.keys[:, :, held + step :][:, :, :1], tokens.values[:, :, held + step :][:, :, :1])
        for rows in alive:
            rows.append(held + step)
        dropped = [data.draw(st.integers(0, held)) for _ in range(2)]
        kept = [[i for i in range(held + 1) if i != gone] for gone in dropped]
        store.take(mx.array([kept]), [held])
        alive = [[rows[i] for i in keep] for rows, keep in zip(alive, kept, strict=True)]
        read = store.dense()[0]
        packed = store.keys.codes.lengths[0]
        assert packed <= held - residual + 1
        for head, rows in enumerate(alive):
            places = mx.array(rows)
            exact = (read[0, head] == tokens.keys[0, head, places]).all(axis=-1)
            coded = mx.abs(read[0, head] - encoded[0, head, places]).max(axis=-1) < 1e-5  # sums in another order
            assert (exact | coded).all()
            assert coded[sinks:packed].all()
            if packed < held:
                assert exact[packed:].all()


def test_a_batch_evicts_as_its_sequences_do():
    """One sequence's codes move, another's rows are encoded anew: each as it would alone."""
    config = Rvq(residual=16, sinks=2, center=False)
    solos = [filled(config, n, dtype=mx.float32, seed=n) for n in (100, 60)]
    batch = solos[0].select([0])
    batch.extend(solos[1].select([0]))
    kept = [90, 20]
    chosen = [sorted(np.random.default_rng(n).permutation(n + 10)[:n].tolist()) for n in kept]
    chosen[1] = sorted(np.random.default_rng(0).permutation(60)[:20].tolist())
    indices = mx.array([[rows + [0] * (90 - len(rows))] * 2 for rows in chosen])
    batch.take(indices, kept)
    for b, solo in enumerate(solos):
        solo.take(indices[b : b + 1, :, : kept[b]], [kept[b]])
        assert contents(batch)[b] == contents(solo)[0]


def test_a_file_of_another_seed_is_refused(tmp_path):
    model = tiny_model("llama")
    cache = make_prompt_cache(model, "rvq(residual=0, seed=3)")
    prompt = mx.random.randint(0, 128, (1, 200), key=mx.random.key(0))
    mx.eval(model(prompt, cache=cache))
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, cache)
    loaded = load_prompt_cache(file, model, "rvq(residual=0, seed=3)")
    for a, b in zip(cache, loaded, strict=True):
        assert contents(a.store) == contents(b.store)
        assert all(same_bits(x, y) for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True))
    with pytest.raises(CacheFileError, match=r"expected the method rvq\(residual=0\), got rvq\(residual=0, seed=3\)"):
        load_prompt_cache(file, model, "rvq(residual=0)")


def test_seeds_rotate_differently():
    stores = [filled(Rvq(residual=0, sinks=0, seed=seed), 128) for seed in (0, 1)]
    assert contents(stores[0])[0]["keys_codes"] != contents(stores[1])[0]["keys_codes"]
    assert Rvq().create(GEOMETRY).lengths == []


@pytest.mark.parametrize(("config", "bits"), [(Rvq(), 2.5), (Rvq(key_bits=3), 3.0), (Rvq(3, 3), 3.5)])
def test_bits_of_an_element_beyond_the_exact_rows(config, bits):
    """What codes, norms and means of a half-precision model of SmolLM2's shape hold."""
    store = filled(config, 1536, heads=3)
    packed = {name: rows for name, rows in contents(store)[0].items() if name.endswith(("codes", "norm", "mean"))}
    elements = 3 * 64 * sum(store.buffers()[f"{side}_codes"].lengths[0] for side in ("keys", "values"))
    assert 8 * sum(map(len, packed.values())) / elements <= bits


def test_rows_to_keep_may_be_unsigned():
    """As topk_rows names them."""
    kept = mx.broadcast_to(mx.arange(0, 120, 2), (1, 2, 60))
    stores = [filled(Rvq(center=False, residual=32), 120) for _ in range(2)]
    for store, dtype in zip(stores, (mx.int32, mx.uint32), strict=True):
        store.take(kept.astype(dtype), [60])
    assert contents(stores[0]) == contents(stores[1])


def decoded(config, *chunks):
    store = RvqStore(config)
    for tokens in chunks:
        store.append(tokens.keys, tokens.values)
    return store


@pytest.mark.parametrize("backend", sorted({leg.backend for leg in legs()}))
def test_stores_that_differ_in_dtype_alone_describe_themselves(monkeypatch, backend):
    monkeypatch.setenv("MLX_KV_BACKEND", backend)
    mixed, pure = (
        decoded(Rvq(center=False, residual=32), random_tokens(0, 100), random_tokens(1, 1, dtype), random_tokens(2, 1))
        for dtype in (mx.float16, mx.float32)
    )
    assert [store.layout().format.dtype for store in (mixed, pure)] == [store.keys.dtype for store in (mixed, pure)]
    assert pure.layout().format.dtype == mx.float32


def test_rows_are_taken_back_after_a_subset_was_kept():
    """Then more rows are packed than the rule says, and the tail does not hold them."""
    store, tokens = RvqStore(Rvq(residual=128, center=False, rollback=3)), random_tokens(0, 400)
    store.append(tokens.keys, tokens.values)
    store.settle()
    store.take(mx.broadcast_to(mx.arange(350), (1, 2, 350)), [350])
    before = store.dense()
    store.truncate(1)
    assert store.lengths == [349]
    assert all(same_bits(read, rows[:, :, :349]) for read, rows in zip(store.dense(), before, strict=True))
