"""KIVI's options, and what is said of those that do not fit."""

import pytest

from mlx_kv import make_prompt_cache
from mlx_kv.spec import Spec
from mlx_kv.testing import tiny_model
from mlx_kv_kivi import Kivi


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "[kivi] expected bits in (2, 3, 4, 8), got 5"),
        ({"bits": 2.0}, "[kivi] expected bits in (2, 3, 4, 8), got 2.0"),
        ({"bits": None}, "[kivi] expected bits in (2, 3, 4, 8), got None"),
        ({"bits": "4"}, "[kivi] expected bits in (2, 3, 4, 8), got 4"),
        ({"key_bits": 1}, "[kivi] expected key_bits in (2, 3, 4, 8), got 1"),
        ({"value_bits": 16}, "[kivi] expected value_bits in (2, 3, 4, 8), got 16"),
        ({"group_size": 16}, "[kivi] expected group_size in (32, 64, 128), got 16"),
        ({"group_size": 32.0}, "[kivi] expected group_size in (32, 64, 128), got 32.0"),
        ({"residual": 100}, "[kivi] expected residual a positive multiple of group_size 32, got 100"),
        ({"residual": 0}, "[kivi] expected residual a positive multiple of group_size 32, got 0"),
        ({"residual": 64, "group_size": 128}, "[kivi] expected residual a positive multiple of group_size 128, got 64"),
        ({"sinks": 128}, "[kivi] expected sinks from 0 to residual 128 - 1, got 128"),
        ({"sinks": -1}, "[kivi] expected sinks from 0 to residual 128 - 1, got -1"),
        ({"sinks": True}, "[kivi] expected sinks from 0 to residual 128 - 1, got True"),
        ({"rollback": -1}, "[kivi] expected rollback of 0 or more, got -1"),
        ({"rollback": 1.5}, "[kivi] expected rollback of 0 or more, got 1.5"),
        ({"defer": 1}, "[kivi] expected defer True or False, got 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is compared)
        Kivi(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "dims", "message"),
    [
        ({}, (80, 80), "[kivi] expected head_dim divisible by group_size 32, got 80"),
        ({"group_size": 64}, (96, 96), "[kivi] expected head_dim divisible by group_size 64, got 96"),
        ({}, (64, 48), "[kivi] expected head_dim divisible by group_size 32, got 48"),
        ({}, (40, 64), "[kivi] expected 2 bits times head_dim to fill 32-bit words, got head_dim 40"),
    ],
)
def test_head_dims_that_do_not_fit_are_refused(options, dims, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is compared)
        Kivi(**options).check(*dims)
    assert str(caught.value) == message


def test_a_model_that_does_not_fit_is_refused_before_anything_is_computed():
    model = tiny_model("llama", head_dim=48)
    with pytest.raises(ValueError, match=r"\[kivi\] expected head_dim divisible by group_size 32, got 48"):
        make_prompt_cache(model, "kivi")


def test_bits_of_keys_and_values():
    assert (Kivi().bits_of_keys, Kivi().bits_of_values) == (2, 2)
    mixed = Kivi(bits=4, key_bits=8)
    assert (mixed.bits_of_keys, mixed.bits_of_values) == (8, 4)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("kivi", "kivi"),
        ("kivi(bits=2, group_size=32, residual=128, sinks=4, rollback=0, defer=False)", "kivi"),
        ("keep_all+kivi(sinks=0, bits=3)", "kivi(bits=3, sinks=0)"),
    ],
)
def test_equal_specs_have_one_text(text, written):
    assert str(Spec.parse(text)) == written
