"""The numbers that kernels are launched with."""

import mlx.core as mx
import pytest

from mlx_kv_kernels.numbers import numbers


@pytest.mark.parametrize(
    ("values", "dtype"),
    [((3, -1, 2**31 - 1), mx.int32), ((0, 2**32 - 1), mx.uint32), ((0.125, -float("inf"), 1.5), mx.float32)],
)
def test_they_arrive_as_they_are(values, dtype):
    array = numbers(values, dtype)
    assert (array.tolist(), array.dtype) == (list(values), dtype)


def test_the_layers_of_a_model_share_them():
    assert numbers((1, 2), mx.int32) is numbers((1, 2), mx.int32)
    assert numbers((1, 2), mx.int32) is not numbers((1, 2), mx.float32)
