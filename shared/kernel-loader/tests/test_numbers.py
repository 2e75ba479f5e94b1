"""The numbers that kernels are launched with."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.numbers import join_numbers, kernel_of, new_numbers, numbers
from mlx_kv_kernels.testing import Leg, Mutant, check_case, check_parity, surviving_mutants


@pytest.mark.parametrize("make", [numbers, new_numbers])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [((3, -1, 2**31 - 1), mx.int32), ((0, 2**32 - 1), mx.uint32), ((0.125, -float("inf"), 1.5), mx.float32)],
)
def test_they_arrive_as_they_are(values, dtype, make):
    array = make(values, dtype)
    assert (array.tolist(), array.dtype) == (list(values), dtype)


@pytest.mark.parametrize("make", [numbers, new_numbers])
def test_the_layers_of_a_model_share_them(make):
    assert make((1, 2), mx.int32) is make((1, 2), mx.int32)
    assert make((1, 2), mx.int32) is not make((1, 2), mx.float32)


def test_a_thread_has_new_ones_of_its_own():
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(new_numbers, (1, 2), mx.int32).result()
    assert theirs is not new_numbers((1, 2), mx.int32)


def join(values, dtype, backend=None):
    """join_numbers, whose reference is the array that Python makes."""
    return mx.array(values, dtype) if backend == "reference" else join_numbers(values, dtype, backend)


def oracle(values, dtype):
    return np.array(values, np.float32 if dtype == mx.float32 else np.int64)


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([mx.int32, mx.uint32, mx.float32]))
    number = {
        mx.int32: st.integers(-(2**31), 2**31 - 1),
        mx.uint32: st.integers(0, 2**32 - 1),
        mx.float32: st.floats(width=32, allow_nan=False),
    }[dtype]
    return {"values": tuple(draw(st.lists(number, min_size=1, max_size=32))), "dtype": dtype}


def test_pairs_make_one_array():
    check_parity(join, cases(), oracle=oracle, examples=25)


MUTANTS = [
    Mutant("thread_position_in_grid.x < 2", "thread_position_in_grid.x < 1"),
    Mutant("thread_position_in_grid.x < 2", "thread_position_in_grid.x < 3"),
    Mutant("numbers[2 * @ + thread_position_in_grid.x]", "numbers[thread_position_in_grid.x]"),
    Mutant("numbers[2 * @ + ", "numbers[2 * @ + 1 + "),
    Mutant("pair@[thread_position_in_grid.x]", "pair@[0]"),
]


def test_every_mutant_is_noticed(emulated):
    checked = [Leg("emulator", (("mode", "check"), ("order", 0)))]

    def check():
        for values in (range(10, 15), range(10, 18)):
            check_case(join, {"values": tuple(values), "dtype": mx.int32}, oracle=oracle, on=checked)

    file = Kernel("join_numbers", "mlx_kv_kernels", (), ())  # of which kernels are made
    assert surviving_mutants(file, MUTANTS, check) == []


def test_the_kernel_of_several_pairs_says_each_once():
    text = kernel_of(3).text
    assert [text.count(name) for name in ("= pair0[", "= pair2[", "= pair3[", "@")] == [1, 1, 0, 0]
