"""The README's Python example, run as it stands with a small model in place of the one that is downloaded."""

import re
from functools import partial
from pathlib import Path

import mlx_lm
import pytest

README = Path(__file__).parents[2] / "README.md"


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
