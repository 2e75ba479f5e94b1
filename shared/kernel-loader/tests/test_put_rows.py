"""put_rows: copies of buffers with one row replaced, whatever their dtypes, widths and addresses."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.put import Put, kernel_of, put_rows
from mlx_kv_kernels.testing import Leg, Mutant, array, arrays, check_case, check_parity, surviving_mutants

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.uint32]


def put(buffers, rows, places, shifts, backend=None):
    """put_rows, with each put's parts in lists."""
    return put_rows([Put(*each) for each in zip(buffers, rows, places, shifts, strict=True)], backend=backend)


def oracle(buffers, rows, places, shifts):
    found = []
    for buffer, row, place, shift in zip(buffers, rows, places, shifts, strict=True):
        buffer, row = np.array(buffer.tolist()), np.array(row.tolist())
        count = buffer.shape[2]
        each = [row[0, :, 0] if i == place else buffer[0, :, min(i + shift, count - 1)] for i in range(count)]
        found.append(np.stack(each, axis=1)[None])
    return found


@st.composite
def cases(draw):
    kv_heads, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    buffers, rows, places, shifts = [], [], [], []
    for _ in range(count):
        length, dtype = draw(st.integers(1, 40)), draw(st.sampled_from(DTYPES))
        width = draw(st.sampled_from([1, 2, 3, 8, 20, 128]))
        buffers.append(draw(arrays((1, kv_heads, length, width), dtype)))
        rows.append(draw(arrays((1, kv_heads, 1, width), dtype)))
        places.append(draw(st.integers(0, length - 1)))
        shifts.append(draw(st.integers(0, min(length, 3))))
    return {"buffers": buffers, "rows": rows, "places": places, "shifts": shifts}


def test_parity():
    check_parity(put, cases(), oracle=oracle, examples=25)


VIEWS = {
    "heads behind tokens, as a projection makes them": lambda x: x.reshape(1, 1, 3, 128).transpose(0, 2, 1, 3),
    "an odd address": lambda x: mx.concatenate([x.reshape(-1), x.reshape(-1)])[1:385].reshape(1, 3, 1, 128),
    "every other channel": lambda x: mx.repeat(x, 2, axis=3)[..., ::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8])
def test_a_row_may_be_a_view(view, dtype):
    buffer, row = array("normal", 0, (1, 3, 9, 128), dtype), VIEWS[view](array("normal", 1, (1, 3, 1, 128), dtype))
    check_case(put, {"buffers": [buffer], "rows": [row], "places": [4], "shifts": [1]}, oracle=oracle)


def test_fewer_elements_than_metal_keeps_in_device_memory():
    arguments = {"buffers": [mx.array([[[[1.5], [2.5]]]])], "rows": [mx.array([[[[3.5]]]])]}
    check_case(put, {**arguments, "places": [1], "shifts": [0]}, oracle=oracle)


def test_the_buffers_given_stay_as_they_are():
    buffer, row = mx.zeros((1, 2, 8, 16)), mx.ones((1, 2, 1, 16))
    put_rows([Put(buffer, row, 3)])
    assert not mx.any(buffer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": mx.zeros((2, 2, 8, 16))}, "expected buffers"),
        ({"row": mx.zeros((1, 2, 2, 16))}, "expected buffers"),
        ({"row": mx.zeros((1, 2, 1, 16), mx.float16)}, "expected buffers"),
        ({"buffer": mx.zeros((1, 3, 8, 16)), "row": mx.zeros((1, 3, 1, 16))}, "expected buffers"),
        ({"place": 8}, "expected place and shift within 8 rows, got 8 and 0"),
        ({"shift": 9}, "expected place and shift within 8 rows, got 0 and 9"),
        ({"shift": -1}, "expected place and shift"),
    ],
)
def test_refuses(change, message):
    fits = Put(mx.zeros((1, 2, 8, 16)), mx.zeros((1, 2, 1, 16)), 0)
    with pytest.raises(ValueError, match=r"\[put_rows\] " + message):
        put_rows([fits, fits._replace(**change)])


MUTANTS = [
    Mutant("BYTES / sizeof(T)", "BYTES / sizeof(T) / 2"),
    Mutant("CHUNKS = WIDTH / ELEMENTS", "CHUNKS = WIDTH"),
    Mutant("rows = numbers[0]", "rows = numbers[0] - 1"),
    Mutant("shift = numbers[1]", "shift = 0"),
    Mutant("place = numbers[2]", "place = numbers[2] + 1"),
    Mutant("row + ulong(head) * WIDTH", "row"),
    Mutant("i < rows * CHUNKS", "i < rows * CHUNKS - 1"),
    Mutant("i += int(threads)", "i += int(threads) + 1"),
    Mutant("own = i / CHUNKS", "own = i / (CHUNKS + 1)"),
    Mutant("first = i % CHUNKS * ELEMENTS", "first = i % CHUNKS"),
    Mutant("begin = ulong(head) * rows", "begin = 0"),
    Mutant("own == place)", "own == place + 1)"),
    Mutant("j < ELEMENTS", "j + 1 < ELEMENTS"),
    Mutant("new_row[first + j]", "new_row[j]"),
    Mutant("metal::min(own + shift, rows - 1)", "(own + shift)"),
    Mutant("metal::min(own + shift, rows - 1)", "metal::min(own, rows - 1)"),
    Mutant("* WIDTH + first;\n            *", "* WIDTH;\n            *"),
    Mutant("numbers + 3 * @", "numbers + 3"),
]


def test_every_mutant_is_noticed(emulated):
    drawn = [
        {
            "buffers": [array("normal", 0, (1, 3, rows, width), dtype)],
            "rows": [array("normal", 1, (1, 3, 1, width), dtype)],
            "places": [5],
            "shifts": [2],
        }
        for rows, width, dtype in ((90, 128, mx.float16), (600, 20, mx.float16), (90, 8, mx.float32))
    ]
    checked = [Leg("emulator", (("mode", "check"), ("order", 0)))]

    def check():
        for case in drawn:
            check_case(put, case, oracle=oracle, on=checked)

    file = Kernel("put_rows", "mlx_kv_kernels", (), ())  # of which kernels are made
    assert surviving_mutants(file, MUTANTS, check) == []


def test_the_kernel_of_several_buffers_says_each_once():
    text = kernel_of(3).text
    assert [text.count(name) for name in ("buffer0", "buffer2", "numbers + 3 * 1", "buffer3", "@")] == [1, 1, 1, 0, 0]
