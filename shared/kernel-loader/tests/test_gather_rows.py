"""gather_rows: a copy of the named rows, whatever their dtype, width, strides and address."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import gather_rows
from mlx_kv_kernels.rows import GATHER_ROWS
from mlx_kv_kernels.testing import Leg, Mutant, array, arrays, check_case, check_parity, surviving_mutants

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.uint32, mx.int64, mx.bool_]


def oracle(rows, indices):
    return np.stack(
        [[head[kept] for head, kept in zip(*pair, strict=True)] for pair in zip(rows, indices, strict=True)]
    )


def indices_of(seed, batch, kv_heads, k, rows, dtype=mx.uint32):
    return mx.array(np.random.default_rng(seed).integers(0, rows, (batch, kv_heads, k)), dtype=dtype)


@st.composite
def cases(draw):
    batch, kv_heads, rows, k = (draw(st.integers(1, high)) for high in (2, 3, 40, 50))
    width = draw(st.sampled_from([1, 3, 8, 20, 128]))
    held = draw(arrays((batch, kv_heads, rows, width), draw(st.sampled_from(DTYPES))))
    indices = indices_of(
        draw(st.integers(0, 999)), batch, kv_heads, k, rows, draw(st.sampled_from([mx.int32, mx.uint32]))
    )
    return {"rows": held, "indices": indices}


def test_parity():
    check_parity(gather_rows, cases(), oracle=oracle, examples=25)


VIEWS = {
    "a prefix of a larger buffer": lambda x: x[:, :, :20],
    "rows from the middle": lambda x: x[:, :, 3:33:2],
    "some channels": lambda x: x[..., 1:17],
    "every other channel": lambda x: x[..., ::2],
    "heads before tokens, as after a transposition": lambda x: x.transpose(0, 2, 1, 3)[:, :, :40],
    "an odd address": lambda x: x.reshape(-1)[1 : 1 + 2 * 3 * 20 * 16].reshape(2, 3, 20, 16),
    "rows of an odd stride": lambda x: x.reshape(-1)[: 2 * 3 * 36 * 35].reshape(2, 3, 36, 35)[..., :16],
    "one head for all": lambda x: mx.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8])
def test_a_view_is_read_in_place(view, dtype):
    rows = VIEWS[view](array("normal", 0, (2, 3, 40, 32), dtype))
    indices = indices_of(1, *rows.shape[:2], 17, rows.shape[2])
    check_case(gather_rows, {"rows": rows, "indices": indices}, oracle=oracle)


def test_fewer_elements_than_metal_keeps_in_device_memory():
    check_case(gather_rows, {"rows": mx.array([[[[1.5], [2.5]]]]), "indices": mx.array([[[1, 0, 1]]])}, oracle=oracle)


@pytest.mark.parametrize(
    ("rows", "indices", "message"),
    [
        (mx.zeros((2, 3, 4)), mx.zeros((2, 3, 1), dtype=mx.int32), "expected rows"),
        (mx.zeros((2, 3, 4, 8)), mx.zeros((2, 1, 1), dtype=mx.int32), r"expected indices \[2, 3, k\]"),
        (mx.zeros((2, 3, 4, 8)), mx.zeros((2, 3, 0), dtype=mx.int32), r"expected indices \[2, 3, k\]"),
        (mx.zeros((2, 3, 4, 8)), mx.zeros((2, 3, 1)), "expected indices int32 or uint32"),
    ],
)
def test_refuses(rows, indices, message):
    with pytest.raises(ValueError, match=r"\[gather_rows\] " + message):
        gather_rows(rows, indices)


MUTANTS = [
    Mutant(
        "template <> struct chunk_of<16> { using type = uint4; };",
        "template <> struct chunk_of<16> { using type = uint2; };",
    ),
    Mutant(
        "template <> struct chunk_of<8> { using type = uint2; };",
        "template <> struct chunk_of<8> { using type = uint4; };",
    ),
    Mutant("BYTES / sizeof(T)", "BYTES / sizeof(T) / 2"),
    Mutant("kv_heads = rows_shape[1], k", "kv_heads = rows_shape[0], k"),
    Mutant("k = indices_shape[2]", "k = indices_shape[2] - 1"),
    Mutant("kept = chunk / CHUNKS,", "kept = chunk / (CHUNKS + 1),"),
    Mutant("first = chunk % CHUNKS * ELEMENTS", "first = chunk % CHUNKS"),
    Mutant("if (kept < k)", "if (kept <= k)"),
    Mutant("indices[ulong(head) * k + kept]", "indices[ulong(head) * k]"),
    Mutant("indices[ulong(head) * k + kept]", "indices[kept]"),
    Mutant("long(head / kv_heads) * rows_strides[0]", "long(head / kv_heads) * rows_strides[1]"),
    Mutant("long(head % kv_heads) * rows_strides[1]", "long(head) * rows_strides[1]"),
    Mutant("row * rows_strides[2]", "row * WIDTH"),
    Mutant("long(first) * rows_strides[3]", "long(first)"),
    Mutant("rows_strides[3] == 1 && reinterpret_cast", "reinterpret_cast"),
    Mutant("&& reinterpret_cast<ulong>(from) % BYTES == 0", ""),
    Mutant("i < ELEMENTS; i++", "i + 1 < ELEMENTS; i++"),
    Mutant("from[long(i) * rows_strides[3]]", "from[i]"),
    Mutant(
        "rows_strides[3] == 1 && reinterpret_cast<ulong>(from) % BYTES == 0",
        "false",
        equivalent="element by element is slower, not different",
    ),
]


def test_every_mutant_is_noticed(emulated):
    buffer = array("normal", 0, (2, 3, 40, 32), mx.float16)
    drawn = [{"rows": view(buffer)} for view in VIEWS.values()] + [
        {"rows": array("normal", 1, (3, 2, 9, 20), mx.float16)}
    ]
    for case in drawn:
        case["indices"] = indices_of(2, *case["rows"].shape[:2], 17, case["rows"].shape[2])
    checked = [Leg("emulator", (("mode", "check"), ("order", 0)))]

    def check():
        for case in drawn:
            check_case(gather_rows, case, oracle=oracle, on=checked)

    assert surviving_mutants(GATHER_ROWS, MUTANTS, check) == []
