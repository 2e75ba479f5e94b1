"""The harness itself: it fails when it should."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st

from mlx_kv_kernels import topk_rows
from mlx_kv_kernels.rows import TOPK_ROWS
from mlx_kv_kernels.testing import FAMILIES, Leg, Mutant, array, arrays, check_case, check_parity, surviving_mutants

HERE = [Leg("emulator")]


@pytest.fixture
def quiet(monkeypatch):
    """Legs without an emulator behind them: the ops below are plain Python."""
    monkeypatch.setattr(Leg, "active", lambda self: __import__("contextlib").nullcontext())


def op(x, backend, error=0.0):
    return x if backend == "reference" else x + error


def test_a_result_that_differs_is_an_error(quiet):
    x = mx.array([1.0, 2.0, 3.0])
    check_case(op, {"x": x}, on=HERE)
    check_case(op, {"x": x, "error": 1e-3}, on=HERE, atol=1e-2)
    with pytest.raises(
        AssertionError, match=r"emulator and the reference differ in 3 of 3 elements of output 0; at \(0,\)"
    ):
        check_case(op, {"x": x, "error": 1e-3}, on=HERE)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.astype(mx.float16),
        lambda x: x[None],
        lambda x: mx.where(mx.isnan(x), 0, x),
        lambda x: [x, x],
    ],
    ids=["dtype", "shape", "NaN", "number of outputs"],
)
def test_dtype_shape_nan_and_number_of_outputs_count(quiet, wrong):
    x = mx.array([1.0, float("nan")])
    with pytest.raises((AssertionError, ValueError)):
        check_case(lambda x, backend: x if backend == "reference" else wrong(x), {"x": x}, on=HERE, atol=10)


def test_a_wrong_reference_is_found_by_the_oracle(quiet):
    with pytest.raises(AssertionError, match="the reference and the oracle differ"):
        check_parity(op, st.builds(dict, x=arrays((4,))), oracle=lambda x: x + 1, on=HERE, examples=5)


def test_no_leg_is_an_error_not_a_pass():
    with pytest.raises(ValueError, match="expected a backend that runs kernels"):
        check_case(op, {"x": mx.zeros((1,))}, on=[])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_families_are_what_they_say(dtype):
    def make(family):
        x = array(family, 0, (64,), dtype)
        assert x.dtype == dtype
        return np.array(x.astype(mx.float32))

    smallest = 2.0**-14 if dtype == mx.float16 else 2.0**-126
    largest = 65504 if dtype == mx.float16 else 3.3e38
    assert len(set(make("constant"))) == 1
    assert len(set(make("ties"))) == 5
    assert np.isnan(make("nan")).any()
    assert set(np.sign(make("inf")[np.isinf(make("inf"))])) == {-1, 1}
    assert (np.abs(make("denormal")) < smallest).all()
    assert (make("denormal") != 0).any()
    assert (np.abs(make("huge")) > largest / 3).all()
    assert np.isfinite(make("huge")).all()
    assert set(np.signbit(make("signed_zeros")[make("signed_zeros") == 0])) == {True, False}
    assert len(FAMILIES) == 8


def test_the_mutation_harness_reports_survivors_and_refuses_nonsense(emulated):
    scores = mx.array(np.random.default_rng(0).standard_normal((1, 1, 40)).astype(np.float32))
    leg = Leg("emulator", (("mode", "check"),))

    def check():
        check_case(topk_rows, {"scores": scores, "k": 3}, on=[leg])

    killed = Mutant("uint4 bits = {0x7fffffffu,", "uint4 bits = {0x7f000000u,")
    survivor = Mutant("key + uint(key == 0x7fffffffu)", "key")  # no zeros among these scores
    assert surviving_mutants(TOPK_ROWS, [killed, survivor], check) == [survivor]
    with pytest.raises(ValueError, match="expected once in the text, got 0 times"):
        surviving_mutants(TOPK_ROWS, [Mutant("not in the text", "")], check)
    with pytest.raises(ValueError, match="does not compile"):
        surviving_mutants(TOPK_ROWS, [Mutant("uint4 bits = {0x7fffffffu,", "uint4 bits = {missing,")], check)
    with pytest.raises(ValueError, match="listed as equivalent, but the check notices it"):
        surviving_mutants(TOPK_ROWS, [Mutant(killed.old, killed.new, equivalent="it is not")], check)
