"""Trained codebooks on disk: safetensors, with the fingerprint of the model that they were fitted for."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import mlx.core as mx

from .trained import TrainedCodec

if TYPE_CHECKING:
    from collections.abc import Mapping

    Sides = tuple[TrainedCodec, TrainedCodec]

FORMAT = "1"


class Codebooks(NamedTuple):
    """What a file holds: codecs of keys and values by layer."""

    model: str
    layers: Mapping[int, Sides]


def save_codebooks(file: str, model: str, layers: Mapping[int, Sides]) -> int:
    """Save codebooks and return their bytes.

    Raises:
        ValueError: if the name does not end in .safetensors.
    """
    if Path(file).suffix != ".safetensors":
        raise ValueError(f"[trained_rvq] expected a name ending in .safetensors, got {file!r}")
    arrays = {f"{layer}.{name}": side.books for layer, sides in layers.items() for name, side in _named(sides)}
    dims = {layer: [side.dim for side in sides] for layer, sides in layers.items()}
    temporary = str(Path(file).with_suffix(f".{os.getpid()}.safetensors"))  # it appears whole or not at all
    mx.save_safetensors(temporary, arrays, {"mlx_kv_rvq": FORMAT, "model": model, "dims": json.dumps(dims)})
    os.replace(temporary, file)
    return sum(array.nbytes for array in arrays.values())


def load_codebooks(file: str) -> Codebooks:
    """Load codebooks; the same file is read once.

    Raises:
        ValueError: if there is no such file, or it is not one that `save_codebooks` wrote.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"[trained_rvq] expected a file that mlx_kv fit wrote, got {file!r}, which is none")
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(4)
def _load(path: Path, _changed: int) -> Codebooks:
    try:
        loaded = mx.load(str(path), return_metadata=True)
        arrays, about = cast("tuple[dict[str, mx.array], dict[str, str]]", loaded)
        mx.eval(arrays)
        dims = {int(layer): tuple(sizes) for layer, sizes in json.loads(about["dims"]).items()}
        layers = {
            layer: (
                TrainedCodec(arrays[f"{layer}.keys"], sizes[0], strided=True),
                TrainedCodec(arrays[f"{layer}.values"], sizes[1], strided=False),
            )
            for layer, sizes in dims.items()
        }
        known = about["mlx_kv_rvq"] == FORMAT
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"[trained_rvq] {path} is damaged or was not written by mlx_kv fit") from error
    if not known:
        raise ValueError(f"[trained_rvq] expected format {FORMAT}, got {about['mlx_kv_rvq']} in {path}")
    return Codebooks(about["model"], layers)


def _named(sides: Sides) -> tuple[tuple[str, TrainedCodec], ...]:
    return (("keys", sides[0]), ("values", sides[1]))
