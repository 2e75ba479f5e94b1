"""Quantisation and packing, against float64 NumPy and plain integers."""

import json
from pathlib import Path

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from mlx_kv_kivi import dequantize_keys, dequantize_values, quantize_keys, quantize_values, reference

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SIDES = {
    "keys": (quantize_keys, dequantize_keys, 0),  # a group lies along axis 0 of [rows, channels]
    "values": (quantize_values, dequantize_values, 1),
}
bits_strategy = st.sampled_from([2, 3, 4, 8])


def unpacked(codes, bits, channels):
    """Read codes from the words' bits, one by one."""
    rows = np.array(codes).reshape(-1, codes.shape[-1])
    numbers = [sum(int(word) << 32 * i for i, word in enumerate(row)) for row in rows]
    read = [[number >> bits * j & (1 << bits) - 1 for j in range(channels)] for number in numbers]
    return np.array(read).reshape(*codes.shape[:-1], channels)


def grouped(x, axis, group_size):
    """Return [rows, channels] as [groups, group_size]."""
    return np.moveaxis(x, axis, -1).reshape(-1, group_size)


def float64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("name", ["kivi_key_per_channel_exact", "kivi_key_per_channel_rounding"])
def test_golden_keys(name):
    given, right = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    got = quantize_keys(mx.array(given["K"]), given["bits"], given["group_size"])
    assert unpacked(got.codes, given["bits"], 2).tolist() == right["codes"]
    assert got.scale.tolist() == right["scale"]
    assert got.minimum.tolist() == right["zero"]
    assert dequantize_keys(got, given["bits"], given["group_size"]).tolist() == right["dequant"]


def test_golden_packing():
    case = GOLDEN["kivi_pack_2bit"]
    words = reference.pack(mx.array(case["inputs"]["codes"]), case["inputs"]["bits"])
    assert words.tolist() == [case["expected"]["uint32"]]
    assert reference.unpack(words, 2, 16).tolist() == case["inputs"]["codes"]


def test_golden_values_are_not_mlx_quantize():
    case = GOLDEN["mlx_affine_differs_from_kivi"]
    x = mx.array(case["inputs"]["group_tile"] * case["inputs"]["repeats"])[None]
    got, right = quantize_values(x, 2, 32), case["expected"]["kivi"]
    assert unpacked(got.codes, 2, 32)[0, :4].tolist() == right["codes"]
    assert np.allclose([got.scale.item(), got.minimum.item()], [right["scale"], right["zero"]], rtol=1e-7)
    assert np.allclose(dequantize_values(got, 2, 32)[0, :4].tolist(), right["dequant"], rtol=1e-6)
    codes, scale, bias = mx.quantize(x, bits=2, group_size=32)
    other = case["expected"]["mlx"]
    assert unpacked(codes, 2, 32)[0, :4].tolist() == other["codes"]
    assert [scale.item(), bias.item()] == [other["scale"], other["bias"]]


@settings(max_examples=150, deadline=None)
@given(bits=bits_strategy, channels=st.integers(1, 130), rows=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_packing_is_the_bits_in_order(bits, channels, rows, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, channels))
    words = reference.pack(mx.array(codes), bits)
    assert words.dtype == mx.uint32
    assert words.shape == (rows, -(-channels * bits // 32))
    assert (unpacked(words, bits, channels) == codes).all()
    assert (np.array(reference.unpack(words, bits, channels)) == codes).all()
    spare = 32 * words.shape[-1] - channels * bits
    assert not spare or not (np.array(words)[:, -1] >> (32 - spare)).any()


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=100, deadline=None)
@given(
    bits=bits_strategy,
    group_size=st.sampled_from([4, 32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([0.0, -5.0, 900.0]),
)
def test_against_float64(side, bits, group_size, dtype, seed, spread, shift):
    quantize, dequantize, axis = SIDES[side]
    shape = (2 * group_size, 9) if axis == 0 else (3, 2 * group_size)
    draw = np.random.default_rng(seed)
    x = mx.array(draw.normal(shift, spread, shape).astype(np.float32)).astype(dtype)
    got = quantize(x, bits, group_size)
    assert got.scale.dtype == got.minimum.dtype == dtype
    given = grouped(float64(x), axis, group_size)
    scale, minimum = (grouped(float64(a), axis, 1) for a in (got.scale, got.minimum))

    # The minimum is one of the numbers; the scale is rounded once to float32 and once to the dtype.
    np.testing.assert_array_equal(minimum, given.min(axis=1, keepdims=True))
    ideal = (given.max(axis=1, keepdims=True) - minimum) / (2**bits - 1)
    ideal[ideal == 0] = 1
    ulp = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    smallest = 2**-24 if dtype == mx.float16 else 0  # fp16's subnormal step
    assert (np.abs(scale - ideal) <= ideal * ulp + smallest).all()

    # Codes follow from the scale and minimum as stored, half to even; float32 may fall to the other side of a tie.
    place = np.clip((given - minimum) / scale, 0, 2**bits - 1)
    codes = grouped(unpacked(got.codes, bits, shape[1]), axis, group_size)
    tied = np.abs(place % 1 - 0.5) < 1e-6 * (1 + place)
    assert ((codes == np.rint(place)) | tied & (np.abs(codes - place) < 0.51)).all()

    # Product and sum are rounded to float32, the result to the dtype.
    read = grouped(float64(dequantize(got, bits, group_size)), axis, group_size)
    exactly = codes * scale + minimum
    rounding = 2**-23 * (codes * scale + np.abs(minimum)) + ulp * np.abs(exactly) + smallest
    assert (np.abs(read - exactly) <= rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("side", SIDES)
def test_constant_groups_are_exact(side, bits, dtype):
    quantize, dequantize, _ = SIDES[side]
    for constant in (0.0, 1e-3, -7.0, 6e4):
        x = mx.full((32, 32), constant).astype(dtype)
        got = quantize(x, bits, 32)
        assert (got.scale == 1).all()
        assert (got.codes == 0).all()
        assert mx.array_equal(dequantize(got, bits, 32), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_the_largest_range_stays_finite(side, dtype):
    """In fp16 the range of 6e4 to -6e4 is inf; the scale of 2 bits is not."""
    quantize, dequantize, _ = SIDES[side]
    x = mx.where(mx.arange(32)[:, None] % 2 == mx.arange(32) % 2, 6e4, -6e4).astype(dtype)
    for bits in (2, 3, 4, 8):
        read = dequantize(quantize(x, bits, 32), bits, 32).astype(mx.float32)
        # The largest code times a scale that the dtype has rounded.
        error = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
        assert mx.abs(read - x.astype(mx.float32)).max().item() <= error * 6e4


@pytest.mark.parametrize("side", SIDES)
def test_a_scale_below_the_dtypes_smallest_number_counts_as_constant(side):
    """fp16's smallest step is 2**-24: a 2-bit range of one such step has a scale that rounds to zero."""
    quantize, dequantize, _ = SIDES[side]
    step = 2.0**-24
    x = mx.where(mx.eye(32) > 0, step, 0).astype(mx.float16)
    got = quantize(x, 2, 32)
    assert (got.scale == 1).all()
    assert (got.codes == 0).all()
    assert (dequantize(got, 2, 32) == 0).all()  # off by no more than one such step
    wide = quantize(x * 3, 2, 32)  # and three steps are told apart
    assert (wide.scale == step).all()
    assert mx.array_equal(dequantize(wide, 2, 32), x * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_a_number_that_is_none_shows_in_its_group_alone(side, dtype, bad):
    quantize, dequantize, axis = SIDES[side]
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x[40, 5] = bad
    read = float64(dequantize(quantize(mx.array(x).astype(dtype), 4, 32), 4, 32))
    spoilt = np.zeros((64, 64), bool)
    spoilt[(slice(32, None), 5) if axis == 0 else (40, slice(0, 32))] = True
    assert np.isnan(read[spoilt]).all()
    assert np.isfinite(read[~spoilt]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_keys(x, 5, 32), r"\[kivi\] expected bits in \(2, 3, 4, 8\), got 5"),
        (lambda x: quantize_keys(x, 2, 33), r"\[kivi\] expected rows divisible by group_size 33, got 64"),
        (lambda x: quantize_values(x, 2, 0), r"\[kivi\] expected channels divisible by group_size 0, got 96"),
        (lambda x: quantize_values(x, 2, 64), r"\[kivi\] expected channels divisible by group_size 64, got 96"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(mx.zeros((64, 96)))
