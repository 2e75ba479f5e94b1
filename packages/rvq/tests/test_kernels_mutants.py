"""Each small change of a kernel's text must be noticed."""

import mlx.core as mx
import pytest

from mlx_kv_kernels.testing import Leg, Mutant, array, check_case, surviving_mutants
from mlx_kv_rvq import Encoded, decode, encode, launch

CHECKED = [Leg("emulator", (("mode", "check"), ("order", 0)))]

ENCODE = [
    Mutant("negative[part * ROWS + r]", "negative[r]"),
    Mutant("ushort(lane / 4 * 4 + b / ROWS)", "ushort(lane / 4 * 4 + b % 4)"),
    Mutant("minus_one_if(lane / mask % 2)", "minus_one_if(lane % 2)"),
    Mutant("counted[i] = thread_index / 4 < skip ? 0.0f : y[i];", "counted[i] = y[i];"),
    Mutant("swapped = (kept ^ given) & upper", "swapped = (kept ^ given) & ~upper"),
    Mutant("x[i] = x[i] + simd_shuffle_xor(x[i], ushort(MASK));", ""),
    Mutant("float(128 - int(skip))", "128.0f"),
    Mutant("block == 0 ? uint(params[1 + sequence]) : 0;", "uint(params[1 + sequence]);"),
    Mutant("precise_mul(float(rounded), metal::sqrt(float(DIM)))", "precise_mul(average, metal::sqrt(float(DIM)))"),
    Mutant("average = precise_mul(average, scale);", ""),
    Mutant("CENTER || row < rows;", "CENTER || row <= rows;"),
    Mutant("square < LARGEST_SQUARE;", "true;"),
    Mutant("7.888609052210118e-31f * DIM", "7.888609052210118e-31f"),
    Mutant("1.2676506002282294e30f * DIM", "1.2676506002282294e30f"),
    Mutant("above ? level[half_size + i]", "above ? level[half_size + i - 1]"),
    Mutant("above ? border[half_size + i]", "above ? border[half_size + i - 1]"),
    Mutant("words[w] ^ changed[w]", "words[w]"),
    Mutant("signs + part * COUNT * sizeof(T) / 4", "signs"),
    Mutant("bits_of(from[(w * IN_WORD + 1) * stride]) << 16", "bits_of(from[(w * IN_WORD + 1) * stride]) << 15"),
    Mutant("reinterpret_cast<ulong>(from) % BYTES == 0", "true"),
    Mutant("y[i] = y[i] - precise_mul(level, size);", "y[i] = y[i] + precise_mul(level, size);"),
    Mutant("code >> (32 - shift)", "code >> (31 - shift)"),
    Mutant("word |= simd_shuffle_xor(word, 2);", ""),
    Mutant("length = precise_mul(precise_mul(square, scale), 1.0f / over_lanes(fold<COUNT>(products)));", ""),
    Mutant("y[i] = usual ? y[i] : 0.0f;", ";"),
    Mutant("whole ? 1u << shift : 1u", "1u"),
    Mutant("negative & ALL >> (32 - shift)", "negative & ALL >> (31 - shift)"),
    Mutant("& 0xffffffffu / ALL) * ALL", "& 0xffffffffu / ALL)"),
    Mutant("as_type<uint>(level) | (as_type<uint>(y[i]) & 0x80000000u)", "as_type<uint>(level)"),
    Mutant("precise_mul(borders[i], size)", "borders[i]"),
]
DECODE = [
    Mutant("y[high] = a - b;", "y[high] = b - a;"),
    Mutant("minus_one_if(lane / mask % 2)", "minus_one_if(lane % 2)"),
    Mutant("butterflies<RUN, COUNT>(y);", ""),
    Mutant("negative[4 * r + lane % 4]", "negative[4 * r]"),
    Mutant("ushort(lane / 4 * 4 + b % 4)", "ushort(lane / 4 * 4 + b / ROWS)"),
    Mutant("codes_strides[2];", "codes_strides[3];"),
    Mutant("words[(word + 1) * stride]", "words[word + 1]"),
    Mutant("<< (32 - shift)", "<< (31 - shift)"),
    Mutant("words + stage * ROW_WORDS * codes_strides[3]", "words + stage * ROW_WORDS"),
    Mutant("levels[stage * ENTRIES + ", "levels["),
    Mutant("of_stage[thread_index % ENTRIES / LEVELS]", "of_stage[thread_index % LEVELS]"),
    Mutant("row / 128 * mean_strides[2]", "row / 64 * mean_strides[2]"),
    Mutant("const bool inside = row < rows;", "const bool inside = row <= rows;"),
    Mutant("flips[first / 32] >> first % 32", "flips[first / 32] >> first % 16"),
    Mutant("(4 * i + part * RUN) * mean_strides[3]", "(4 * i + part) * mean_strides[3]"),
]

# Two variants between them reach every line; `skip` and what the block's mean needs are of the first.
CENTERED = {"bits": 3, "stages": 1, "unbiased": False, "center": True}
STAGED = {"bits": 2, "stages": 2, "unbiased": True, "center": False}


def rows(shape, dtype, seed=0):
    x = array("normal", seed, shape, dtype)
    x[..., 3, :] = 0
    return x


def encode_cases():
    shifted = mx.pad(rows((2, 2, 256, 80), mx.float32) + 1, [(0, 0), (0, 0), (2, 3), (0, 0)])[:, :, 2:-3]
    large = rows((2, 1, 33, 128), mx.float32)
    large[..., 7, :] *= 2.0**60  # not where it would make its whole block's mean large
    large[..., 8, :] *= 2.0**45  # a norm of about 2^48, and one of 2^-53: still usual, and not
    large[..., 9, :] *= 2.0**-56
    large = mx.pad(large, [(0, 0)] * 3 + [(1, 2)])[..., 1:-2]  # not aligned
    half = mx.pad(rows((1, 1, 128, 112), mx.float16) + 3.3, [(0, 0)] * 3 + [(1, 2)])[..., 1:-2]
    return [
        {"x": shifted, "skip": [5, 0], **CENTERED},
        {"x": large, "skip": [], **STAGED},
        {"x": half, "skip": [100], **CENTERED},
    ]


def decode_cases():
    cases = []
    for case in encode_cases()[:2]:
        encoded = encode_op(**case, backend="reference")
        codes, norm, *mean = (mx.pad(a, [(0, 0)] * 3 + [(0, 1)])[..., :-1] for a in encoded)
        options = {name: case[name] for name in ("bits", "stages")}
        codes = mx.contiguous(codes.swapaxes(2, 3)).swapaxes(2, 3)
        finite = mx.where(mx.isnan(norm), 1, norm)
        cases.append(
            {"codes": codes, "norm": finite, "mean": mean[0] if mean else None, "dim": case["x"].shape[-1], **options}
        )
    return cases


def encode_op(x, skip, bits, stages, unbiased, center, backend):
    codes, norm, mean = encode(x, bits, stages, 7, unbiased=unbiased, center=center, skip=skip, backend=backend)
    return [codes, norm] if mean is None else [codes, norm, mean]


def decode_op(codes, norm, mean, bits, stages, dim, backend):
    return decode(Encoded(codes, norm, mean), bits, stages, 7, channels=dim, dtype=mx.float32, backend=backend)


KERNELS = {
    "encode": (launch.ENCODE, ENCODE, encode_op, encode_cases, 0.0),
    "decode": (launch.DECODE, DECODE, decode_op, decode_cases, 1e-4),  # sums in another order
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_noticed(emulated, name):
    kernel, mutants, op, make, atol = KERNELS[name]
    cases = make()

    def check():
        for case in cases:
            check_case(op, case, atol=atol, on=CHECKED)

    assert surviving_mutants(kernel, mutants, check) == []
