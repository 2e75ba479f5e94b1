"""The numbers that kernels are launched with."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from mlx_kv_kernels.numbers import new_numbers, numbers


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
