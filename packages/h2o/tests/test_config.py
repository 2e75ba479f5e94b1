import pytest

from mlx_kv import SpecError
from mlx_kv.spec import Spec
from mlx_kv.testing import tiny_model
from mlx_kv_h2o import H2O

ROWS = " of 1 or more rows, or a share between 0 and 1, got "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heavy": 0}, "[h2o] expected heavy" + ROWS + "0"),
        ({"recent": -3}, "[h2o] expected recent" + ROWS + "-3"),
        ({"heavy": 1.0}, "[h2o] expected heavy" + ROWS + "1.0"),
        ({"recent": True}, "[h2o] expected recent" + ROWS + "True"),
        ({"heavy": "many"}, "[h2o] expected heavy" + ROWS + "many"),
        ({"heavy": 0.5, "recent": 0.5}, "[h2o] expected shares of less than 1 together, got 1.0"),
        ({"every_chunk": 1}, "[h2o] expected every_chunk True or False, got 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        H2O(**options)
    assert str(raised.value) == message


def test_specs_read_back():
    for text in ("h2o", "h2o(heavy=0.1, recent=0.1)", "h2o(heavy=64, recent=8, every_chunk=True)+dense"):
        spec = Spec.parse(text)
        assert Spec.parse(str(spec)) == spec


def test_an_option_that_does_not_exist():
    with pytest.raises(SpecError, match=r"\[h2o\] expected options among every_chunk, heavy, recent, got 'budget'"):
        Spec.parse("h2o(budget=20)")


def test_rows_kept():
    assert H2O().kept(5000) == H2O().kept(0) == (1024, 512)
    assert H2O(heavy=0.1, recent=0.1).kept(1234) == (246, 123)
    assert H2O(heavy=0.1, recent=0.1).kept(3) == (2, 1)  # never nothing
    assert H2O(heavy=0.1, recent=8).kept(0) is None  # a share of what?


def test_token_groups_are_refused():
    """Where kivi is installed: dropping single rows would break its groups of tokens."""
    pytest.importorskip("mlx_kv_kivi")
    from mlx_kv import make_prompt_cache

    with pytest.raises(
        ValueError, match=r"\[kivi\] expected a policy that drops rows when a prompt ends, got one that"
    ):
        make_prompt_cache(tiny_model("llama"), "h2o+kivi")
