import pytest

from mlx_kv.spec import Spec
from mlx_kv.testing import tiny_model
from mlx_kv_keyformer import Keyformer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget of 1 or more rows, or a share between 0 and 1, got 0"),
        ({"budget": 1.0}, "budget of 1 or more rows, or a share between 0 and 1, got 1.0"),
        ({"budget": True}, "budget of 1 or more rows, or a share between 0 and 1, got True"),
        ({"recent": 1}, "recent from 0 to less than 1, got 1"),
        ({"recent": "all"}, "recent from 0 to less than 1, got all"),
        ({"tau_init": 0}, "tau_init above 0, got 0"),
        ({"tau_end": float("nan")}, "tau_end above 0, got nan"),
        ({"steps": 0}, "steps of 1 or more, got 0"),
        ({"noise": -1}, "noise of 0 or more, got -1"),
        ({"seed": 2**32}, "seed from 0 to 2**32 - 1, got 4294967296"),
        ({"seed": 0.5}, "seed from 0 to 2**32 - 1, got 0.5"),
        ({"every_chunk": None}, "every_chunk True or False, got None"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        Keyformer(**options)
    assert str(raised.value) == "[keyformer] expected " + message


def test_specs_read_back():
    for text in ("keyformer", "keyformer(budget=64, recent=0, noise=0)", "keyformer(tau_end=4.0, seed=3)+dense"):
        spec = Spec.parse(text)
        assert Spec.parse(str(spec)) == spec


def test_rows_kept():
    assert Keyformer(budget=100).kept(5000) == Keyformer(budget=100).kept(0) == (100, 30)
    assert Keyformer().kept(1) == (1, 0)  # never nothing
    assert Keyformer().kept(0) is None  # a share of what?


def test_token_groups_are_refused():
    """Where kivi is installed: dropping single rows would break its groups of tokens."""
    pytest.importorskip("mlx_kv_kivi")
    from mlx_kv import make_prompt_cache

    with pytest.raises(
        ValueError, match=r"\[kivi\] expected a policy that drops rows when a prompt ends, got one that"
    ):
        make_prompt_cache(tiny_model("llama"), "keyformer+kivi")
