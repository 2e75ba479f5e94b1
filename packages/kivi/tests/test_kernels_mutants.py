"""Small changes of the kernels' text, each of which a comparison with the reference must notice."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv_kernels import UnavailableBackendError, resolve_backend
from mlx_kv_kernels.testing import Leg, Mutant, array, check_case, surviving_mutants
from mlx_kv_kivi import Quantized, dequantize_keys, dequantize_values, launch, quantize_keys, quantize_values

CHECKED = [Leg("emulator", (("mode", "check"), ("order", 0)))]

SLOWER = "16-byte loads are faster, not different"
LOAD = [
    Mutant("to[1] = float(as_type<T>(ushort(word >> 16)));", "to[1] = float(as_type<T>(ushort(word >> 15)));"),
    Mutant("unpack<T>(words.z, to + 4);", "unpack<T>(words.y, to + 4);"),
    Mutant("reinterpret_cast<ulong>(from) % 16 == 0", "true"),
]
QUANTIZE = [
    *LOAD,
    Mutant("q = metal::fma(distance, inverse, distance * rest);", "q = distance * inverse;"),
    Mutant("largest > 15 ? metal::min(q, largest) : q;", "q;"),
    Mutant(
        "return metal::min(metal::fma(distance, inverse, distance * rest), largest);",
        "return metal::fma(distance, inverse, distance * rest);",
    ),
    Mutant("return distance / scale;", "return distance * (1.0f / scale);"),
    Mutant("sequence * x_strides[0]", "sequence * x_strides[1]"),
    Mutant("low = metal::min(low, simd_shuffle_xor(low, mask));", ""),
    Mutant("finite = range < RANGE_LIMIT;", "finite = range < INFINITY;"),
    Mutant(">= SMALLEST_SCALE", "> 0"),
    Mutant("? NAN :", "? 0.0f :"),
    Mutant("+= own.code_above", "= own.code_above"),
    Mutant("<< (BITS * c % 32);", "<< (BITS * c % 16);"),
    Mutant("stride == 1 && reinterpret_cast<ulong>(from) % 16 == 0", "false", equivalent=SLOWER),
]
STORE = [
    Mutant("uint(as_type<ushort>(high)) << 16", "uint(as_type<ushort>(high)) << 15"),
    Mutant("pack(from[4], from[5])", "pack(from[4], from[4])"),
]
DEQUANTIZE = [
    *STORE,
    Mutant("i < 3; i++) codes", "i < 2; i++) codes"),
    Mutant("BITS * c < 32 ?", "true ?"),
    Mutant(">> (BITS * c % 32)", ">> (BITS * c % 16)"),
    Mutant(
        "precise_add(precise_mul(as_type<float>(code | 0x4b000000u) - 8388608.0f, scale), minimum)",
        "metal::fma(as_type<float>(code | 0x4b000000u) - 8388608.0f, scale, minimum)",
    ),
    Mutant("sequence * codes_strides[0]", "sequence * codes_strides[1]"),
    Mutant("head * scale_strides[1]", "head * minimum_strides[1]"),
]

MUTANTS = {
    "quantize_keys": [
        *QUANTIZE,
        *STORE,
        Mutant("LANES = GROUP / 8", "LANES = GROUP / 16"),
        Mutant("slot = lane / ITEMS", "slot = lane % ITEMS"),
        Mutant("inside = group < groups", "inside = group <= groups"),
        Mutant("mask = ITEMS; mask < 32", "mask = ITEMS; mask < 16"),
        Mutant("packed[r][BITS * c / 32]", "packed[r][0]"),
        Mutant("if (slot == 0) {", "if (slot < 2) {"),
    ],
    "quantize_values": [
        *QUANTIZE,
        Mutant("of[1][0] << 16, of[2][0]", "of[1][0] << 15, of[2][0]"),
        Mutant("uint4{of[2][0], of[2][1],", "uint4{of[2][0], of[2][0],"),
        Mutant("inside = row < rows", "inside = row <= rows"),
        Mutant("mask = 1; mask < LANES", "mask = 1; mask <= LANES"),
        Mutant("if (part % LANES == 0) {", "if (true) {"),
        Mutant("scale[place / LANES] = own.scale;", "scale[place / LANES] = own.minimum;"),
    ],
    "dequantize_keys": [
        *LOAD,
        *DEQUANTIZE,
        Mutant("LANES = GROUP / 8", "LANES = GROUP / 16"),
        Mutant("slot = lane / ITEMS", "slot = lane % ITEMS"),
        Mutant("inside = group < groups", "inside = group <= groups"),
        Mutant("if (slot == 0) {", "if (slot == LANES - 1) {"),
        Mutant("simd_shuffle(minima[c], ushort(lane % ITEMS))", "minima[c]"),
    ],
    "dequantize_values": [
        *DEQUANTIZE,
        Mutant("LANES = GROUP / 8", "LANES = GROUP / 16"),
        Mutant("first_row = item / chunks * 4", "first_row = item / chunks * 3"),
        Mutant("        if (row < rows) {", "        if (row <= rows) {"),
        Mutant("if (lane % LANES == 0) {", "if (lane % LANES == 1) {"),
        Mutant("simd_shuffle(scales[r], ushort(lane / LANES * LANES))", "scales[r]"),
    ],
}  # fmt: skip


def groups_of(dtype, bits, group_size, rng):
    """Groups [count, group_size] of all that the rules speak of."""
    top = 2**bits - 1
    steps = np.resize([0, top, *(np.arange(top) + 0.5)], group_size)
    normal = rng.standard_normal((12, group_size))
    odd = {mx.float32: 1e38, mx.bfloat16: 1e38, mx.float16: 3e4}[dtype]
    special = np.where(rng.random((6, group_size)) < 0.3, [[np.nan], [np.inf], [-np.inf], [odd], [-odd], [0.0]], 1.0)
    pairs = [(-(2.0**99), 2.0**99), (0, top * 2.0**-81), (-(2.0**-127), 1), (0, 2.5 * top * 2.0**-25), (-0.99, 255)]
    limits = [np.resize(pair, group_size) for pair in pairs]
    borders = (1 + rng.integers(0, 128, (12, 1)) / 128) * steps
    with np.errstate(over="ignore"):
        return np.concatenate([normal, special, limits, borders]).astype(np.float32)


def quantize_cases(side):
    rng = np.random.default_rng(0)
    cases = []
    for dtype, bits, group_size, view in (
        (mx.bfloat16, 8, 128, lambda x: mx.pad(x, [(0, 0), (0, 0), (2, 3), (0, 0)])[:, :, 2:-3]),
        (mx.float16, 2, 32, lambda x: x),
        (mx.float32, 3, 32, lambda x: mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3)),
        (mx.float32, 3, 32, lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, 3)])[..., :-3]),
        (mx.float16, 2, 32, lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, 3)])[..., :-3]),
        (mx.float32, 3, 32, lambda x: x),
    ):
        groups = groups_of(dtype, bits, group_size, rng)
        if side == "keys":
            x = groups[rng.integers(0, len(groups), (2, 3, 2, 96))].swapaxes(3, 4).reshape(2, 3, -1, 96)
        else:
            x = groups[rng.integers(0, len(groups), (2, 3, 11, 3))].reshape(2, 3, 11, -1)
        cases.append({"x": view(mx.array(x).astype(dtype)), "bits": bits, "group_size": group_size})
    return cases


def dequantize_cases(side):
    def codes_as_they_are(codes, scale, minimum):
        return codes, scale, minimum

    def rows_of_larger_buffers(codes, scale, minimum):
        rows = [(0, 0), (0, 0), (2, 3), (0, 0)]
        return mx.pad(codes, rows)[:, :, 2:-3], mx.pad(scale, rows)[:, :, 2:-3], minimum

    def all_strided(codes, scale, minimum):
        channels = [(0, 0), (0, 0), (0, 0), (1, 2)]
        swapped = mx.contiguous(scale.swapaxes(2, 3)).swapaxes(2, 3)
        return mx.contiguous(codes.swapaxes(2, 3)).swapaxes(2, 3), swapped, mx.pad(minimum, channels)[..., 1:-2]

    cases = []
    for dtype, bits, group_size, views in (
        (mx.bfloat16, 2, 64, rows_of_larger_buffers),
        (mx.float16, 8, 32, all_strided),
        (mx.float32, 3, 32, all_strided),
        (mx.float32, 3, 32, codes_as_they_are),
    ):
        rows, channels = (2 * group_size, 96) if side == "keys" else (11, 3 * group_size)
        groups = (2, 3, 2, channels) if side == "keys" else (2, 3, rows, 3)
        codes = array("integers", 0, (2, 3, rows, channels * bits // 32), mx.uint32)
        codes, scale, minimum = views(codes, array("normal", 1, groups, dtype), array("normal", 2, groups, dtype))
        cases.append({"codes": codes, "scale": scale, "minimum": minimum, "bits": bits, "group_size": group_size})
    return cases


def dequantize(function):
    def op(codes, scale, minimum, bits, group_size, backend):
        return function(Quantized(codes, scale, minimum), bits, group_size, backend=backend)

    return op


KERNELS = {
    "quantize_keys": (launch.QUANTIZE_KEYS, quantize_keys, quantize_cases("keys")),
    "quantize_values": (launch.QUANTIZE_VALUES, quantize_values, quantize_cases("values")),
    "dequantize_keys": (launch.DEQUANTIZE_KEYS, dequantize(dequantize_keys), dequantize_cases("keys")),
    "dequantize_values": (launch.DEQUANTIZE_VALUES, dequantize(dequantize_values), dequantize_cases("values")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_noticed(name):
    try:
        resolve_backend("emulator")
    except UnavailableBackendError as error:
        pytest.skip(str(error))
    kernel, op, cases = KERNELS[name]

    def check():
        for case in cases:
            check_case(op, case, on=CHECKED)

    assert surviving_mutants(kernel, MUTANTS[name], check) == []
