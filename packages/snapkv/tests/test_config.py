import pytest

from mlx_kv import SpecError
from mlx_kv.spec import Spec
from mlx_kv_snapkv import SnapKV

BUDGET = "[snapkv] expected budget of at least window + sinks = 32 rows, or a share between 0 and 1, got "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "[snapkv] expected window of 1 or more, got 0"),
        ({"sinks": -1}, "[snapkv] expected sinks of 0 or more, got -1"),
        (
            {"budget": 31},
            "[snapkv] expected budget of at least window + sinks = 32 rows, or a share between 0 and 1, got 31",
        ),
        (
            {"budget": 1.5},
            "[snapkv] expected budget of at least window + sinks = 32 rows, or a share between 0 and 1, got 1.5",
        ),
        (
            {"budget": True},
            "[snapkv] expected budget of at least window + sinks = 32 rows, or a share between 0 and 1, got True",
        ),
        ({"kernel_size": 4}, "[snapkv] expected kernel_size odd, got 4"),
        ({"pooling": "sum"}, "[snapkv] expected pooling in ('max', 'avg'), got 'sum'"),
        ({"every_chunk": 1}, "[snapkv] expected every_chunk True or False, got 1"),
        ({"decode_budget": 8}, "[snapkv] expected decode_budget 0, or at least window + sinks = 32 rows, got 8"),
        ({"interval": 0}, "[snapkv] expected interval of 1 or more, got 0"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        SnapKV(**options)
    assert str(raised.value) == message


def test_specs_read_back():
    for text in ("snapkv", "snapkv(budget=0.25, pooling='avg')", "snapkv(budget=64, window=8)+dense"):
        spec = Spec.parse(text)
        assert Spec.parse(str(spec)) == spec


def test_an_option_that_does_not_exist():
    with pytest.raises(SpecError, match=r"\[snapkv\] expected options among budget, window.*got 'beta'"):
        Spec.parse("snapkv(beta=20)")
