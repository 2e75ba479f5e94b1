"""Fused attention over encoded rows, in the rotated basis, against float64 over the rows that the store gives back."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import attention
from mlx_kv_kernels import source
from mlx_kv_kernels.testing import Leg, legs
from mlx_kv_rvq import Rvq, RvqStore

attend = pytest.importorskip("mlx_kv_fused_attention", reason="fused attention reads the rows").attend

CHECKED = Leg("emulator", (("mode", "check"), ("order", 0)))
# Half types round the rotated query and, in tiles, the folded one, the levels and the probabilities; the output twice.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 1.6e-2}
CASES = {
    "tiles of centred keys": (Rvq(residual=64), 64, mx.float16, [400, 140]),
    "tiles of 4 and 2 bits": (Rvq(key_bits=4, residual=0, sinks=0, center=False), 64, mx.bfloat16, [150]),
    "rows of several stages": (
        Rvq(key_bits=3, value_bits=1, stages=2, residual=32, center=False),
        96,
        mx.float16,
        [90],
    ),
    "rows of a power of two": (Rvq(residual=20, sinks=9, center=False), 128, mx.float32, [140]),
    "rows of an odd head dim": (Rvq(residual=20, unbiased=False), 80, mx.float32, [200, 30, 1]),
}


def numbers(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def filled(config, dim, dtype, lengths):
    """A store of rows with a bias in some channels, for the means; the last three come singly."""
    store, n = RvqStore(config), max(lengths)
    keys, values = (mx.random.normal((len(lengths), 2, n, dim), key=mx.random.key(i)) for i in range(2))
    keys = keys + mx.where(mx.arange(dim) % 16 == 3, 4.0, 0.0)
    keys, values = keys.astype(dtype), values.astype(dtype)
    for first, last in ((0, n - 3), *((i, i + 1) for i in range(n - 3, n))):  # shorter sequences end before
        spans = [(0, max(min(last, length) - first, 0)) for length in lengths]
        store.append(keys[:, :, first:last], values[:, :, first:last], spans)
        if last == n - 3:
            store.settle()
    return store


def truth(queries, store, scale):
    keys, values = (numbers(rows) for rows in store.dense())
    outputs = []
    for b, n in enumerate(store.lengths):
        q = numbers(queries)[b, :, 0].reshape(2, -1, queries.shape[3])
        scores = scale * np.einsum("hgd,hrd->hgr", q, keys[b, :, :n])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        outputs.append(np.einsum("hgr,hrd->hgd", weights, values[b, :, :n]).reshape(-1, 1, values.shape[3]))
    return np.stack(outputs)


def error(case, leg):
    config, dim, dtype, lengths = CASES[case]
    store = filled(config, dim, dtype, lengths)
    queries = mx.random.normal((len(lengths), 8, 1, dim), key=mx.random.key(9)).astype(dtype)
    layout = store.layout()
    with leg.active():
        output = attend(queries, layout, dim**-0.5, backend=leg.backend)
        mx.eval(output)
    exact = truth(queries, store, dim**-0.5)
    return np.linalg.norm(numbers(output) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("case", CASES)
def test_fused_attention(case):
    tolerance = TOLERANCE[CASES[case][2]]
    # Both kernels on every way to run them; what else the text has, in the emulator's strictest one and on GPUs.
    everywhere = case in ("tiles of centred keys", "rows of an odd head dim")
    chosen = [leg for leg in legs() if everywhere or leg == CHECKED or leg.backend != "emulator"]
    for leg in [*chosen, Leg("reference")]:
        assert error(case, leg) < tolerance, leg


def test_tiles_are_what_both_sides_have_encoded():
    assert filled(Rvq(residual=64), 64, mx.float16, [300, 140, 500]).layout().extent.tiles == (
        (128, 128),
        (128, 128),
        (128, 384),
    )
    assert filled(Rvq(sinks=0, residual=64), 64, mx.float16, [300]).layout().extent.tiles == ((0, 128),)
    assert filled(Rvq(center=False, residual=64), 64, mx.float16, [300]).layout().extent.tiles == ((64, 192),)
    assert filled(Rvq(key_bits=3), 64, mx.float16, [300]).layout().format.tile_rows == 0
    assert RvqStore(Rvq()).layout() is None


def test_caches_decode_in_the_rotated_basis(emulated, monkeypatch):
    """mlx_kv's own call turns the query once and the output back once, and gives policies the same logits."""
    store = filled(Rvq(residual=32), 64, mx.float32, [200])
    queries = mx.random.normal((1, 4, 1, 64), key=mx.random.key(9))
    assert attention.decode(store, queries, 0.125) is None  # on a CPU the reference attends
    monkeypatch.setenv("MLX_KV_BACKEND", "emulator")
    output, logits = attention.decode(store, queries, 0.125, logits=True)
    monkeypatch.setenv("MLX_KV_BACKEND", "reference")
    assert np.allclose(numbers(output), truth(queries, store, 0.125), atol=1e-5)
    assert np.allclose(numbers(logits), numbers(attention.logits(store, queries, 0.125, None)), atol=1e-4)


MUTANTS = {
    "tiles of centred keys": [
        ("moved.mean += long(row / BLOCK) * DIM;", ""),
        ("(mean + first), f.minima", "(mean), f.minima"),
        ("PLANE == 0 ? 0x00020002u", "PLANE == 1 ? 0x00020002u"),
        ("float ratio() const { return ratio_of_bits; }", "float ratio() const { return 1.0f; }"),
        ("float origin() const { return lowest; }", "float origin() const { return 0.0f; }"),
        ("return size * lowest;", "return 0.0f;"),
        ("float factor(int row) const { return float(norm[row]); }", "float factor(int row) const { return 1.0f; }"),
    ],
    "rows of a power of two": [
        ("place + 12", "place + 11"),
        ("(row < exact_rows ? exact : tail)", "tail"),
        ("mask < 32; mask *= 2", "mask < 16; mask *= 2"),
        ("x[high] = a - b;", "x[high] = b - a;"),
        ("own.load(query + first, DIM - first);", "own.load(query, DIM - first);"),
        ("x[j] = row[first + j];", "x[j] = row[j];"),
        ("metal::rsqrt(float(DIM)) * minus_one_if(flips[c / 32] >> (c % 32) & 1);", "metal::rsqrt(float(DIM));"),
    ],
    "rows of an odd head dim": [
        ("0x6996u", "0x6997u"),
        ("hadamard[i / POWER] >> (c / POWER)", "hadamard[c / POWER] >> (i / POWER)"),
        ("^ (flips[c / 32] >> (c % 32) & 1)", "^ (flips[c / 32] >> (c % 31) & 1)"),
        ("(hadamard, i, metal::min(first + j, DIM - 1))", "(hadamard, first + j, i)"),
        ("r.mean.get(j)", "r.mean.get(0)"),
        ("row < packed_rows", "row <= packed_rows"),
    ],
    "rows of several stages": [
        ("own + stage * STREAM, first", "own + STREAM, first"),
        ("levels[stage * LEVELS + r.codes", "levels[r.codes"),
        ("r.codes[stage].get", "r.codes[0].get"),
    ],
}


def test_tiles_where_matrices_may_flush_subnormals(emulated, monkeypatch):
    """On Apple GPUs codes are differences of numbers above 1024; the emulator can tell whether they are right."""
    import mlx_kv_fused_attention.kernel as kernel

    original, file = source.read, ("mlx_kv_rvq", "kernels/rvq_rows.metal")
    text = original(*file)
    assert text.count(", SUBNORMAL> ") == 2
    changed = text.replace(", SUBNORMAL> ", ", false> ")
    monkeypatch.setattr(kernel, "read", lambda *name: changed if name == file else original(*name))
    assert error("tiles of centred keys", CHECKED) < TOLERANCE[mx.float16]


@pytest.mark.parametrize("case", MUTANTS)
def test_every_mutant_is_noticed(emulated, monkeypatch, case):
    tolerance = TOLERANCE[CASES[case][2]]
    original = source.read
    files = [("mlx_kv_rvq", f"kernels/{name}.metal") for name in ("rvq_rows", "rotation", "rotated_basis")]
    import mlx_kv_emulator
    import mlx_kv_fused_attention.kernel as kernel

    for old, new in MUTANTS[case]:
        texts = {file: original(*file) for file in files}
        assert sum(text.count(old) for text in texts.values()) == 1, old
        changed = {file: text.replace(old, new) for file, text in texts.items()}
        monkeypatch.setattr(kernel, "read", lambda *name, to=changed: to.get(name) or original(*name))
        try:
            found = error(case, CHECKED)
        except mlx_kv_emulator.EmulatorError:
            continue
        assert not found < tolerance, f"{old} -> {new} was not noticed"
