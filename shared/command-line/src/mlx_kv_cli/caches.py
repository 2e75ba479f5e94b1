"""From `--method` to caches, with the user's mistakes told as such."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlx_kv import load_prompt_cache, make_prompt_cache
from mlx_kv_cli import lm
from mlx_kv_cli.errors import UserError
from mlx_kv_cli.models import LoadedModel


def make_cache(loaded: LoadedModel, method: str | None) -> lm.Cache:
    """A fresh cache for a method; mlx-lm's own without one.

    Raises UserError when the method is wrong or does not fit the model.
    """
    if method is None:
        return lm.full_cache(loaded.model)
    try:
        return make_prompt_cache(loaded.model, method)
    except ValueError as error:  # SpecError and UnsupportedModelError are ValueErrors
        raise UserError(f"--method {method}: {error}") from error


def load_cache(loaded: LoadedModel, file: Path, method: str | None) -> lm.Cache:
    """A cache that `mlx_kv.save_prompt_cache` wrote. Raises UserError when it cannot be read or belongs elsewhere."""
    try:
        return load_prompt_cache(str(file), loaded.model, method)
    except (OSError, ValueError, RuntimeError) as error:  # MLX tells of an unreadable file by a RuntimeError
        raise UserError(f"--prompt-cache-file {file}: {error}") from error


def cache_factory(loaded: LoadedModel, method: str | None) -> lm.CacheFactory:
    """Make caches for a method again and again; the method is checked at once."""
    make_cache(loaded, method)
    return lambda: make_cache(loaded, method)


def quantized_factory(loaded: LoadedModel, bits: int, group_size: int) -> lm.CacheFactory:
    """Mlx-lm's own quantised caches, checked at once."""
    try:  # MLX says only when it quantises whether the sizes suit it
        lm.feed(loaded.model, mx.zeros((1, 1), mx.int32), lm.quantized_cache(loaded.model, bits, group_size))
    except ValueError as error:
        raise UserError(f"--kv-bits {bits}: {error}") from error
    return lambda: lm.quantized_cache(loaded.model, bits, group_size)
