"""The encoding against float64, the published errors, and the numbers at a dtype's limits."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv_rvq import decode, encode
from mlx_kv_rvq.codebook import codebooks, midpoints
from mlx_kv_rvq.reference import pack, unpack
from mlx_kv_rvq.rotation import HEAD_DIMS, negative, odd_part, rotate_unscaled, turn_back

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def normal(shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def read_back(x, bits, stages=1, seed=0, **options):
    return decode(encode(x, bits, stages, seed, **options), bits, stages, seed, channels=x.shape[-1], dtype=x.dtype)


def matrix(dim, seed):
    """The rotation in float64: Sylvester's part times the odd one, which MLX's transform gives."""
    two = np.ones((1, 1))
    while two.shape[0] < dim // odd_part(dim):
        two = np.block([[two, two], [two, -two]])
    odd = np.ones((1, 1))
    if odd_part(dim) > 1:
        odd = np.array(mx.hadamard_transform(mx.eye(odd_part(dim)), scale=1.0)).astype(np.float64).T
    assert np.array_equal(odd @ odd.T, odd_part(dim) * np.eye(odd_part(dim)))
    return np.kron(odd, two) * np.where(negative(dim, seed), -1, 1) / math.sqrt(dim)


def test_hadamard_of_the_worked_example():
    given, expected = GOLDEN["hadamard_rotation"]["inputs"], GOLDEN["hadamard_rotation"]["expected"]
    signs = mx.where(mx.array(negative(4, 0)), -1.0, 1.0)
    y = rotate_unscaled(mx.array(given["x"]) * signs, 0) * signs.size**-0.5  # the signs cancel
    assert y.tolist() == expected["y"]
    assert (turn_back(y, 0) * signs).tolist() == expected["roundtrip"]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rotations_are_orthonormal_and_undone(dim):
    x = normal((50, dim))
    exact = np.array(x).astype(np.float64) @ matrix(dim, 3).T
    turned = rotate_unscaled(x, 3) * dim**-0.5
    assert np.allclose(np.array(turned), exact, atol=1e-5)  # float32 sums of up to 256 numbers
    assert np.allclose(np.array(turn_back(turned, 3)), np.array(x), atol=1e-5)
    assert negative(dim, 3) != negative(dim, 4)


def test_codebooks_are_of_least_error():
    """Each level is the mean of its cell under the density, by a midpoint sum of its own, and cells end half-way."""
    for dim, bits in ((64, 2), (128, 4), (256, 3)):
        (levels,) = codebooks(dim, bits, 1)
        t = (np.arange(2_000_000) + 0.5) / 1_000_000 - 1
        density = (1 - t * t) ** ((dim - 3) / 2)
        cell = np.searchsorted(midpoints(levels), t)
        means = np.bincount(cell, t * density) / np.bincount(cell, density)
        # Levels come from 16,384 points, whose cells end up to half a point away.
        assert np.allclose(means, levels, atol=2e-3 / math.sqrt(dim))
        assert np.array_equal(levels, -np.array(levels)[::-1])


@pytest.mark.parametrize(
    ("bits", "published", "of_unbiased"),
    [(1, 0.361, 0.567), (2, 0.116, 0.131), (3, 0.0340, 0.035), (4, 0.0093, 0.0093)],
)
def test_error_and_slope_of_unit_vectors(bits, published, of_unbiased):
    """The least-error norm shrinks inner products by as much as it saves; `unbiased` pays for a slope of 1."""
    x = normal((8192, 128))
    x = x / mx.linalg.norm(x, axis=-1, keepdims=True)
    error, slope = {}, {}
    for unbiased in (False, True):
        y = read_back(x, bits, unbiased=unbiased)
        error[unbiased] = float(((x - y) ** 2).sum(axis=-1).mean())
        slope[unbiased] = float((x * y).sum(axis=-1).mean())
    assert error[False] == pytest.approx(published, rel=0.02)
    assert slope[False] == pytest.approx(1 - error[False], rel=2e-3)
    assert slope[True] == pytest.approx(1, rel=1e-3)
    # |x - y|^2 with <x, y> = 1 is |y|^2 - 1 = 1 / cos^2 - 1. A row's own best scale would leave 1 - cos^2, and its norm
    # leaves up to 2% more than that.
    assert error[True] == pytest.approx(error[False] / (1 - error[False]), rel=0.02)
    assert error[True] == pytest.approx(of_unbiased, rel=0.02)
    if bits == 2:
        assert slope[False] == pytest.approx(0.884, rel=2e-3)


def test_every_stage_lowers_the_error():
    x = normal((512, 64))
    for bits in (1, 2, 4):
        errors = [float(((read_back(x, bits, stages) - x) ** 2).mean()) for stages in (1, 2, 3)]
        assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]


@pytest.mark.parametrize(("dim", "bits", "stages", "center"), [(128, 2, 1, True), (80, 3, 2, False), (112, 1, 3, True)])
def test_codes_and_norms_are_float64_s(dim, bits, stages, center):
    x = normal((2, 256, dim), seed=dim) + 2 * normal((1, 1, dim), seed=1)
    skip = [3, 0] if center else []
    codes, norm, mean = encode(x, bits, stages, 5, unbiased=False, center=center, skip=skip)
    y = np.array(x).astype(np.float64) @ matrix(dim, 5).T
    if center:
        counted = y.reshape(2, 2, 128, dim).copy()
        means = counted.mean(axis=2)
        means[0, 0] = counted[0, 0, 3:].mean(axis=0)
        assert np.allclose(np.array(mean), means, atol=1e-5)
        y = y - np.repeat(means, 128, axis=1)
    exact = np.linalg.norm(y, axis=-1, keepdims=True)
    assert np.allclose(np.array(norm.astype(mx.float32)), exact, rtol=2**-8)  # bfloat16
    left = y / exact
    words = codes.shape[-1] // stages
    for stage, levels in enumerate(codebooks(dim, bits, stages)):
        got = np.array(unpack(codes[..., stage * words : (stage + 1) * words], bits, dim))
        levels = np.array(levels)
        distance = np.abs(left[..., None] - levels)
        nearest = distance.argmin(-1)
        taken = np.take_along_axis(distance, got[..., None].astype(np.int64), axis=-1)[..., 0]
        assert (got == nearest).mean() > 0.999
        assert np.allclose(taken, distance.min(-1), atol=1e-6)  # others are as near, in float32
        left = left - levels[got]
    unit = y / exact
    unbiased = encode(x, bits, stages, 5, unbiased=True, center=center, skip=skip)
    assert mx.array_equal(unbiased.codes, codes)
    slope = (unit * (unit - left)).sum(axis=-1, keepdims=True)  # of the unit vector and what it decodes to
    assert np.allclose(np.array(unbiased.norm.astype(mx.float32)), exact / slope, rtol=2**-8)  # bfloat16


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing(bits):
    """Code j at bit bits*j, little-endian, without gaps."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 80)).astype(np.uint32)
    words = np.array(pack(mx.array(codes), bits))
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[:, : 80 * bits].reshape(3, 80, bits)
    assert np.array_equal((stream << np.arange(bits)).sum(-1), codes)
    assert words.shape[-1] == -(-80 * bits // 32)
    assert np.array_equal(np.array(unpack(mx.array(words), bits, 80)), codes)


def test_means_take_the_bias_of_keys_away():
    """A fixed bias of a norm of about 750 in three channels, and unit noise: the logits that queries see survive."""
    rng = np.random.default_rng(0)
    bias = np.zeros(128)
    bias[[5, 40, 99]] = 400, -450, 430
    keys = mx.array((rng.standard_normal((1, 2, 256, 128)) + bias).astype(np.float32))
    queries = rng.standard_normal((32, 128))
    for seed in (0, 1):
        read = np.array(read_back(keys, 4, seed=seed, center=True)).astype(np.float64)
        exact = np.array(keys).astype(np.float64)
        for head in range(2):
            for q in queries:
                assert np.corrcoef(exact[0, head] @ q, read[0, head] @ q)[0, 1] >= 0.99


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_no_norm_overflows(dtype):
    """Rows of 6e4 have norms beyond float16's numbers."""
    x = (6e4 * mx.sign(normal((1, 1, 128, 256)))).astype(dtype)
    for center in (False, True):
        y = read_back(x, 4, center=center).astype(mx.float32)
        big = mx.abs(x.astype(mx.float32))
        ok = mx.isfinite(y) | (big * 1.5 > mx.finfo(dtype).max)  # what is read back a little larger may overflow
        assert ok.all()
        assert mx.isfinite(encode(x, 4, center=center).norm).all()


def test_numbers_at_the_limits():
    x = normal((6, 64))
    x[0], x[1] = 0, 1e-20
    x[2] *= 2.0**60
    x[3, 5], x[4, 5] = float("nan"), float("inf")
    y = read_back(x, 2)
    assert (y[:2] == 0).all()
    assert mx.isnan(y[2:5]).all()
    assert mx.isfinite(y[5]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 5}, r"expected bits in \(1, 2, 3, 4\), got 5"),
        ({"stages": 4}, r"expected stages in \(1, 2, 3\), got 4"),
        ({"x": mx.zeros((2, 48))}, r"expected head_dim in \(64, 80, 96, 112, 128, 192, 256\), got 48"),
        ({"center": True}, "expected whole blocks of 128 rows to center, got 2 rows"),
        ({"x": mx.zeros((1, 128, 64)), "center": True, "skip": [128]}, "expected skip from 0 to 127"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=rf"\[rvq\] {message}"):
        encode(**{"x": mx.zeros((2, 64)), "bits": 2, **arguments})


def test_no_rows():
    encoded = encode(mx.zeros((2, 0, 80)), 3, center=True)
    assert [array.shape for array in encoded] == [(2, 0, 8), (2, 0, 1), (2, 0, 80)]
    assert decode(encoded, 3, channels=80, dtype=mx.float32).shape == (2, 0, 80)


def test_codes_of_other_channels_are_refused():
    with pytest.raises(ValueError, match=r"\[rvq\] expected 8 words of codes a row, got 4"):
        decode(encode(mx.zeros((2, 64)), 2), 2, channels=128, dtype=mx.float32)
