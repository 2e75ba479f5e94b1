import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_kv import make_prompt_cache
from mlx_kv_cli import lm
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.report import Uncompressed, cache_report, environment, ranges
from mlx_kv_cli.texts import TOPICS, documentation, read_text


def test_layers_left_alone_are_grouped_by_reason(tiny):
    cache = make_prompt_cache(tiny, "dense", skip_layers=[1])
    tiny(mx.arange(256)[None] % 128, cache=cache)
    report = cache_report(cache)
    assert report.not_compressed == (Uncompressed("skipped on request", (1,)),)
    assert [layer["rows"] for layer in report.layers] == [256, 256]
    assert report.fp16_bytes == 2 * 2 * 32 * 256 * 2  # layers, K and V, channels, tokens, bytes
    assert report.bytes_held == cache[0].nbytes + 2 * 32 * 256 * 4
    assert report.ratio == report.fp16_bytes / report.bytes_held


def test_an_empty_cache_has_no_ratio(tiny):
    assert cache_report(lm.full_cache(tiny)).ratio is None


def test_environment_names_machine_and_versions():
    facts = environment()
    assert {"python", "system", "device", "mlx", "mlx-lm", "mlx-kv", "mlx-kv-cli"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_number_once(numbers):
    named = []
    for part in filter(None, ranges(sorted(numbers)).split(", ")):
        low, _, high = part.partition("-")
        named.extend(range(int(low), int(high or low) + 1))
    assert named == sorted(numbers)


def test_ranges_are_as_long_as_they_can_be():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_texts_are_files_or_topics(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("words", encoding="utf-8")
    assert read_text(str(file)) == "words"
    assert read_text("typesseq") == TOPICS["typesseq"]
    assert TOPICS["typesseq"] in "".join(documentation())
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"cannot read the text .*text\.txt: "):
        read_text(str(file))
    with pytest.raises(UserError, match="no file and no pydoc topic is called 'nowhere'"):
        read_text("nowhere")
