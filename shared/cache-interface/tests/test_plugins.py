"""Methods found through entry points, broken packages among them."""

import dataclasses

import pytest

from mlx_kv import SpecError, make_prompt_cache, methods
from mlx_kv.spec import Spec
from mlx_kv.testing import tiny_model


def test_the_package_provides_its_own_methods():
    found = {method.name: method for method in methods()}
    assert found["dense"].kind == "store"
    assert found["keep_all"].kind == "policy"
    for name in ("dense", "keep_all"):
        assert found[name].distribution == "mlx-kv"
        assert found[name].summary
        assert found[name].error is None
        assert found[name].options == {}


def test_a_broken_package_is_named_and_takes_no_other_down(add_method):
    add_method("broken", ImportError("no module named 'something'"))
    found = {method.name: method for method in methods()}
    assert found["broken"].error == "ImportError(\"no module named 'something'\")"
    assert found["broken"].distribution == "package_of_broken:Config"
    assert found["dense"].error is None
    with pytest.raises(SpecError, match=r"method 'broken' of package_of_broken:Config cannot be loaded: ImportError"):
        Spec.parse("broken")
    model = tiny_model("llama")
    assert len(make_prompt_cache(model, "dense")) == 2


def test_a_package_with_something_else_behind_its_name_is_named(add_method):
    add_method("odd", print)
    found = {method.name: method for method in methods()}
    assert found["odd"].kind == "unknown"
    assert found["odd"].error


def test_a_method_tells_its_options(add_method):
    @dataclasses.dataclass(frozen=True)
    class Config:
        """Keep every second row.

        More text.
        """

        kind = "store"
        offset: int = 1

    add_method("second", Config)
    found = {method.name: method for method in methods()}["second"]
    assert found.options == {"offset": 1}
    assert found.summary == "Keep every second row."
