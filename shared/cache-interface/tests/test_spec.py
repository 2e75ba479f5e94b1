"""Specs: what they say, and what is said of those that cannot be read."""

import dataclasses

import pytest

from mlx_kv import Dense, KeepAll, SpecError, plugins
from mlx_kv.spec import Spec


@pytest.mark.parametrize("text", ["dense", " dense ", "dense()", "keep_all", "keep_all+dense", "keep_all() + dense()"])
def test_equal_specs_have_one_text(text):
    spec = Spec.parse(text)
    assert str(spec) == "dense"
    assert (spec.policy_name, spec.store_name) == ("keep_all", "dense")
    assert (spec.policy, spec.store) == (KeepAll(), Dense())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"\[mlx_kv\] expected a spec such as 'kivi\(bits=2\)', got ''"),
        ("dense(", r"\[mlx_kv\] expected a spec such as 'kivi\(bits=2\)', got 'dense\('"),
        ("dense+dense", r"\[mlx_kv\] expected a policy, a store or policy\+store, got store\+store in 'dense\+dense'"),
        ("dense+keep_all", r"expected a policy, a store or policy\+store, got store\+policy"),
        ("keep_all+keep_all", r"got policy\+policy"),
        ("keep_all+dense+dense", r"\[mlx_kv\] expected name\(key=value, ...\), got 'keep_all \+ dense'"),
        ("dense-keep_all", r"\[mlx_kv\] expected name\(key=value, ...\), got 'dense - keep_all'"),
        ("dense(3)", r"\[mlx_kv\] expected name\(key=value, ...\), got 'dense\(3\)'"),
        ("dense(**x)", r"\[mlx_kv\] expected name\(key=value, ...\)"),
        ("a.b()", r"\[mlx_kv\] expected name\(key=value, ...\), got 'a.b\(\)'"),
        ("3", r"\[mlx_kv\] expected name\(key=value, ...\), got '3'"),
        ("nothing", r"\[mlx_kv\] no method 'nothing' is installed; installed are .*dense.*keep_all"),
        ("dense(bits=2)", r"\[dense\] expected options among none, got 'bits'"),
        ("toy(bits=2, bits=4)", r"\[toy\] expected each option once, got 'toy\(bits=2, bits=4\)'"),
        ("toy(bit=2)", r"\[toy\] expected options among bits, mode, got 'bit'"),
        ("toy(bits=open('x'))", r"\[mlx_kv\] expected a literal or a word, got \"open\('x'\)\""),
        ("toy(bits='two')", r"\[toy\] .*'<' not supported.*, got \"toy\(bits='two'\)\""),
    ],
)
def test_bad_specs_are_refused(toy, text, message):
    with pytest.raises(SpecError, match=message):
        Spec.parse(text)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("toy", "toy"),
        ("toy(bits=2)", "toy"),
        ("toy(bits = 4, mode=fast)", "toy(bits=4, mode='fast')"),
        ("toy(mode='fast', bits=4)", "toy(bits=4, mode='fast')"),
        ("keep_all+toy(bits=-1)", "toy(bits=-1)"),
    ],
)
def test_options_are_literals_or_words(toy, text, written):
    assert str(Spec.parse(text)) == written
    assert str(Spec.parse(written)) == written


def test_a_value_out_of_range_is_the_methods_to_refuse(toy):
    with pytest.raises(ValueError, match=r"\[toy\] expected bits below 9, got 9"):
        Spec.parse("toy(bits=9)")


@pytest.fixture
def toy(add_method):
    @dataclasses.dataclass(frozen=True)
    class Toy:
        """A store with options."""

        kind = "store"
        bits: int = 2
        mode: str = "slow"

        def __post_init__(self):
            if not self.bits < 9:
                raise ValueError(f"[toy] expected bits below 9, got {self.bits}")

        def create(self, geometry):
            return Dense().create(geometry)

    add_method("toy", Toy)
    assert plugins.load_method("toy") is Toy
    return Toy
