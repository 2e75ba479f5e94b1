"""Prompt caches on disk: safetensors with everything needed to refuse a file that does not fit."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import utils
from mlx_lm.models import cache as mlx_lm_cache

from . import plugins
from .cache import CompressedKVCache
from .errors import CacheFileError
from .identity import fingerprint
from .seam import connect
from .spec import Spec

FORMAT = "2"
_NO_DIGEST = "0" * 64  # stands in the file while the digest over the whole file is computed
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: Sequence[Any], metadata: dict[str, str] | None = None
) -> None:
    """Save a prompt cache that `make_prompt_cache` made, layers with mlx-lm's own cache included.

    The file appears whole or not at all, replacing one of the same name.

    Args:
        file_name: a name ending in .safetensors.
        cache: the cache list of one generation.
        metadata: strings of the caller's, given back by `load_prompt_cache`.

    Raises:
        ValueError: if no layer of the cache is ours, or the name has another ending.
    """
    target = Path(file_name)
    if target.suffix != ".safetensors":
        raise ValueError(f"[save_prompt_cache] expected a name ending in .safetensors, got {target.name!r}")
    ours = [layer for layer in cache if isinstance(layer, CompressedKVCache)]
    if not ours:
        raise ValueError(
            "[save_prompt_cache] expected a cache made by mlx_kv.make_prompt_cache, got none of its layers"
        )
    origin = ours[0].origin
    arrays: dict[str, mx.array] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache):
        flat = cast("list[tuple[str, Any]]", utils.tree_flatten(layer.state))
        arrays.update({f"{index}.{name}": value for name, value in flat if isinstance(value, mx.array)})
        plain = {name: value for name, value in flat if not isinstance(value, mx.array)}
        layers.append(
            {"class": type(layer).__name__, "plain": plain, "reason": getattr(layer, "uncompressed_reason", None)}
        )
    description = {
        "mlx_kv": FORMAT,
        "digest": _NO_DIGEST,
        "model": origin["model"],
        "spec": origin["spec"],
        "versions": json.dumps(_versions(origin["spec"])),
        "layers": json.dumps(layers),
        "metadata": json.dumps(metadata or {}),
    }
    handle, temporary = tempfile.mkstemp(suffix=".safetensors", prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        mx.save_safetensors(temporary, arrays, description)
        _seal(Path(temporary))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_prompt_cache(
    file_name: str | os.PathLike[str], model: Any, spec: str | None = None, return_metadata: bool = False
) -> Any:
    """Load a prompt cache, in any process, ready to go on.

    Args:
        file_name: a file that `save_prompt_cache` wrote.
        model: the model that is to use it.
        spec: the method that is expected; None takes the file's own.
        return_metadata: also return the strings that were saved with it.

    Returns:
        The cache list, or (cache list, metadata).

    Raises:
        CacheFileError: if the file is damaged, or was written for another model, with another method or by another
        version.
    """
    description = _verified(Path(file_name))
    if description.get("mlx_kv") != FORMAT:
        raise CacheFileError(
            f"[load_prompt_cache] expected format {FORMAT}, got {description.get('mlx_kv')} in {file_name}"
        )
    if spec is not None and str(Spec.parse(spec)) != description["spec"]:
        raise CacheFileError(
            f"[load_prompt_cache] expected the method {Spec.parse(spec)}, got {description['spec']} in {file_name}"
        )
    versions, present = json.loads(description["versions"]), _versions(description["spec"])
    if versions != present:
        raise CacheFileError(f"[load_prompt_cache] expected a file of {present}, got one of {versions} in {file_name}")
    if description["model"] != fingerprint(model):
        raise CacheFileError(f"[load_prompt_cache] {file_name} was saved for another model")
    connect()  # in a fresh process nothing else has
    arrays: dict[str, mx.array] = mx.load(str(file_name))  # type: ignore[assignment]
    mx.eval(arrays)  # mx.load is lazy: nothing may depend on the file once this returns
    layers = [_rebuild(index, layer, arrays) for index, layer in enumerate(json.loads(description["layers"]))]
    return (layers, json.loads(description["metadata"])) if return_metadata else layers


def _rebuild(index: int, layer: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Any:
    prefix = f"{index}."
    own = [(name.removeprefix(prefix), value) for name, value in arrays.items() if name.startswith(prefix)]
    state: Any = utils.tree_unflatten(own + list(layer["plain"].items()))
    if layer["class"] == CompressedKVCache.__name__:
        return CompressedKVCache.from_state(state)
    cache = getattr(mlx_lm_cache, layer["class"]).from_state(state)
    cache.uncompressed_reason = layer["reason"]
    return cache


def _versions(spec: str) -> dict[str, str]:
    """Return major.minor of the packages that give this spec's saved state its meaning."""
    parsed = Spec.parse(spec)
    versions = plugins.versions((parsed.policy_name, parsed.store_name))
    return {name: ".".join(version.split(".")[:2]) for name, version in sorted(versions.items())}


def _seal(file: Path) -> None:
    """Write the digest of the whole file, computed with zeros in its place."""
    digest, place, _ = _digest(file)
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(digest)


def _verified(file: Path) -> dict[str, str]:
    """Return the file's description after checking every byte of it."""
    digest, place, header = _digest(file)
    written = re.compile(rb"[0-9a-f]{64}").match(header, place - 8)
    if written is None or written.group() != digest:
        raise CacheFileError(f"[load_prompt_cache] {file} is damaged: its content does not match its digest")
    return json.loads(header)["__metadata__"]


def _digest(file: Path) -> tuple[bytes, int, bytes]:
    """Return the digest of a safetensors file with zeros in the digest's place, that place, and the JSON header."""
    damaged = CacheFileError(f"[load_prompt_cache] {file} is damaged or was not written by mlx_kv.save_prompt_cache")
    if file.stat().st_size < 8:
        raise damaged
    # The header is eight bytes of length, then JSON. Mapped, so that a cache of gigabytes is not read into memory for
    # this.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        match = _DIGEST.search(header)
        if match is None:
            raise damaged
        place = 8 + match.start(1)
        digest = hashlib.sha256(content[:place] + _NO_DIGEST.encode())
        with memoryview(content) as view, view[place + len(_NO_DIGEST) :] as rest:
            digest.update(rest)
    return digest.hexdigest().encode(), place, header
