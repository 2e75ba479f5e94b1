"""The README: its example runs as it stands, with a small model in place of its own; its figures come from files."""

import re
import runpy
from functools import partial
from pathlib import Path

import mlx_lm
import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.mark.needs("kivi")
def test_python_example(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(mlx_lm, "load", lambda name: (smollm2.model, smollm2.tokenizer))
    monkeypatch.setattr(mlx_lm, "generate", partial(mlx_lm.generate, max_tokens=20))
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["text"].strip()
    held, fp16 = (int(number) for number in re.findall(r"(\d+) bytes held, (\d+) in", capsys.readouterr().out)[0])
    assert held == names["report"].bytes_held
    assert fp16 == names["report"].fp16_bytes
    assert fp16 > 0


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "benchmarks/readme_table.py"))


@pytest.mark.needs("kivi", "rvq", "snapkv", "pyramidkv", "h2o", "keyformer", "fused")  # their folders hold files
def test_the_table_is_made_from_the_files(script):
    made = f"{script['BEGIN']}\n{script['table'](ROOT)}\n{script['END']}"
    assert made in README.read_text(), "run `uv run python benchmarks/readme_table.py`"


def test_figures_without_a_file_are_missing(script, tmp_path):
    rows = script["table"](tmp_path).splitlines()[2:]
    assert len(rows) == len(script["ROWS"])
    assert all(set(row.split("`")[2].replace(";", "")) == {" ", "|", "-"} for row in rows)


def test_a_selftest_counts_where_every_case_of_a_package_passed(script):
    def file(on_gpu, *results):
        named = [dict(zip(("package", "backend", "status"), result, strict=True)) for result in results]
        return {"ran_on_gpu": on_gpu, "machine": {"device": {"device_name": "GPU"}}, "results": named}

    read = script["READERS"]["ran_on_gpu"]
    gone = [("a", "metal", "not run"), ("b", "metal", "not run")]
    cpu = file(False, ("a", "emulator", "passed"), ("b", "emulator", "failed"), ("b", "emulator", "passed"), *gone)
    assert dict(read(cpu)) == {"a": {"kernels ran on": "emulator"}}
    gpu = file(True, ("a", "cuda", "failed"), ("a", "emulator", "passed"), ("b", "cuda", "passed"), *gone)
    assert dict(read(gpu)) == {"b": {"kernels ran on": "GPU"}}
