"""One wheel in an environment of its own, outside the workspace; then a package that only this test has beside it."""

import importlib.util
import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "template"
pytestmark = pytest.mark.needs("kivi")

# One process tells everything: most of its time goes into importing mlx-lm.
FACTS = """
import json, sys
from importlib.metadata import distributions
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_kv import make_prompt_cache, memory_report, methods
from mlx_kv.spec import Spec

model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=256, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=96,
))
cache = make_prompt_cache(model, sys.argv[1])
steps = list(generate_step(mx.arange(400) % 96, model, prompt_cache=cache, max_tokens=8))
report = memory_report(cache)
try:
    refusal = Spec.parse("broken") and None
except ValueError as error:
    refusal = str(error)
print(json.dumps({
    "ours": sorted(each.name for each in distributions() if each.name.startswith("mlx-kv")),
    "methods": {each.name: each.error for each in methods()},
    "rows": [layer.rows for layer in report.layers],
    "ratio": report.bytes_held / report.fp16_bytes,
    "refusal": refusal,
}))
"""


class Alone:
    """A fresh environment with KIVI's wheel and what it depends on."""

    def __init__(self, uv, wheels, folder):
        self.uv, self.wheels, self.folder = uv, wheels, folder
        self.python = folder / "environment/bin/python"
        uv("venv", "--python", "3.11", folder / "environment")
        (wheel,) = wheels.glob("mlx_kv_kivi-*.whl")
        self.install(f"{wheel}[cpu]")

    def install(self, *what):
        # "--no-config": this workspace is none of its business
        self.uv("pip", "install", "--no-config", "--python", self.python, "--find-links", self.wheels, *what)

    def run(self, *arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [self.python, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def facts(self, spec):
        return json.loads(self.run("-c", FACTS, spec))


@pytest.fixture(scope="module")
def alone(uv, wheels, tmp_path_factory):
    return Alone(uv, wheels, tmp_path_factory.mktemp("alone"))


@pytest.fixture
def beside(alone, uv, tmp_path):
    """Build and install a package for one test."""
    installed = []

    def add(package, name):
        uv("build", "--no-sources", "--wheel", "--out-dir", tmp_path, package)
        (wheel,) = tmp_path.glob("*.whl")
        alone.install(wheel)
        installed.append(name)

    yield add
    uv("pip", "uninstall", "--no-config", "--python", alone.python, *installed)


@pytest.fixture(scope="module")
def create():
    """The template's function, from its file."""
    spec = importlib.util.spec_from_file_location("create", TEMPLATE / "create.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.create


def test_it_compresses_with_nothing_else_of_ours(alone):
    facts = alone.facts("kivi(residual=32)")
    assert facts["ours"] == ["mlx-kv", "mlx-kv-kernels", "mlx-kv-kivi"]
    assert facts["methods"] == {"dense": None, "keep_all": None, "kivi": None}
    assert facts["rows"] == [408, 408]
    assert facts["ratio"] < 0.7  # of two bytes a number, though the model's are of four
    assert not list(alone.python.parent.glob("mlx?kv*"))  # no command line


def test_a_new_method_is_one_folder(alone, beside, create, tmp_path):
    package = create("first-rows", tmp_path)
    beside(package, "mlx-kv-first-rows")
    facts = alone.facts("first_rows(budget=100)+kivi(residual=32)")
    assert facts["methods"] == {"dense": None, "keep_all": None, "kivi": None, "first_rows": None}
    assert facts["rows"] == [108, 108]
    # Its own tests, the slow checks left out; the whole of them is for the author of a method to run.
    alone.install("mlx-kv[testing]", "pytest")
    quick = "select or attributes or counters or trimmable or merged_sequences"
    assert " passed" in alone.run("-m", "pytest", "--import-mode=importlib", "-q", package / "tests", "-k", quick)


def test_a_broken_package_is_named_and_takes_nothing_down(alone, beside, tmp_path):
    source = tmp_path / "src/mlx_kv_broken"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "pyproject.toml").write_text(
        textwrap.dedent("""
            [project]
            name = "mlx-kv-broken"
            version = "0.1.0"
            entry-points."mlx_kv.methods" = { broken = "mlx_kv_broken:Broken" }
            [build-system]
            requires = ["uv_build>=0.9,<0.14"]
            build-backend = "uv_build"
            """)
    )
    beside(tmp_path, "mlx-kv-broken")
    facts = alone.facts("kivi(residual=32)")
    assert "a_module_that_nobody_has" in facts["methods"].pop("broken")
    assert facts["methods"] == {"dense": None, "keep_all": None, "kivi": None}
    assert facts["rows"] == [408, 408]
    assert "[mlx_kv] method 'broken' of mlx-kv-broken cannot be loaded: ModuleNotFoundError" in facts["refusal"]
