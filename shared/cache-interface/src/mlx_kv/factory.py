"""Caches for a model, from a spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

from mlx_lm.models.cache import KVCache

from .cache import CompressedKVCache
from .errors import UnsupportedModelError
from .identity import fingerprint
from .probe import Layer, probe
from .spec import Spec


class CachePlan:
    """What to make for each layer of a model, worked out once.

    Calling it returns a fresh cache list.
    """

    def __init__(self, model: Any, spec: str, skip_layers: Sequence[int] = ()) -> None:
        """Read the spec, probe the model and check every layer; raises as `make_prompt_cache` does."""
        self.spec = Spec.parse(spec)
        self._own = _own_caches(model)
        caches = self._own()
        skipped = _positive(skip_layers, len(caches))
        layers = probe(model, caches)
        self.model_fingerprint = fingerprint(model)
        chosen = [Layer(None, "skipped on request") if i in skipped else layer for i, layer in enumerate(layers)]
        if all(layer.geometry is None for layer in chosen):
            raise UnsupportedModelError("[mlx_kv] expected skip_layers to leave a layer to compress, got them all")
        self.layers = _placed(chosen, self.model_fingerprint)
        fresh = self()  # a method that does not fit a layer says so now
        if any(layer.shares for layer in layers) and any(_evicts(cache) for cache in fresh):
            raise UnsupportedModelError(
                f"[{self.spec.policy_name}] this model shares keys and values between layers, so rows cannot be "
                "evicted; a store alone works"
            )

    def __call__(self) -> list[Any]:
        """Return fresh caches, one for each layer."""
        return [self._cache(layer, own) for layer, own in zip(self.layers, self._own(), strict=True)]

    def _cache(self, layer: Layer, own: Any) -> Any:
        if layer.geometry is None:
            own.uncompressed_reason = layer.reason
            return own
        policy, store = self.spec.create(layer.geometry)
        origin = {
            "model": self.model_fingerprint,
            "spec": str(self.spec),
            "geometry": dataclasses.asdict(layer.geometry),
        }
        return CompressedKVCache(policy, store, origin)


def make_prompt_cache(model: Any, spec: str, skip_layers: Sequence[int] = ()) -> list[Any]:
    """Make a compressed prompt cache for `mlx_lm.generate` and its kin.

    Args:
        model: a model as `mlx_lm.load` returns it.
        spec: `policy`, `store` or `policy+store`, each `name(key=value, ...)`, such as
        "snapkv(budget=1024)+kivi(bits=2)".
        skip_layers: cache indices to leave uncompressed; negative ones count from the end.

    Returns:
        A fresh list with one cache per layer. Layers that cannot be compressed keep mlx-lm's own cache; `memory_report`
        says why.

    Raises:
        SpecError: if the spec cannot be read or names a method that is not installed.
        ValueError: if the method does not fit the model's shape, or skip_layers is out of range.
        UnsupportedModelError: if no layer can be compressed.
    """
    return CachePlan(model, spec, skip_layers)()


def install(model: Any, spec: str, skip_layers: Sequence[int] = ()) -> Callable[[], None]:
    """Make mlx_lm's generate, server, BatchGenerator and lm-eval compress this model's cache (`model.make_cache`).

    Arguments and errors are those of `make_prompt_cache`.

    Returns:
        A function that undoes it; it raises RuntimeError if a later install has not been undone before.
    """
    plan = CachePlan(model, spec, skip_layers)
    before = cast("dict[str, Any]", vars(model)).get("make_cache")
    object.__setattr__(model, "make_cache", plan)

    def undo() -> None:
        if vars(model).get("make_cache") is not plan:
            raise RuntimeError("[mlx_kv] expected the last install to be undone first, and once")
        object.__delattr__(model, "make_cache")
        if before is not None:
            object.__setattr__(model, "make_cache", before)

    return undo


def _own_caches(model: Any) -> Callable[[], list[Any]]:
    """Return what makes the model's own caches, also where `install` stands in front."""
    installed = cast("dict[str, Any]", vars(model)).get("make_cache")
    if isinstance(installed, CachePlan):
        return installed._own  # pyright: ignore[reportPrivateUsage]
    if hasattr(model, "make_cache"):
        return model.make_cache  # bound now: once installed, the attribute is ours
    return lambda: [KVCache() for _ in model.layers]


def _placed(layers: list[Layer], model: str) -> list[Layer]:
    """Tell every compressed layer its place among them, and whose layer it is."""
    total = sum(layer.geometry is not None for layer in layers)
    places = count()
    placed: list[Layer] = []
    for layer in layers:
        if layer.geometry is not None:
            geometry = dataclasses.replace(layer.geometry, index=next(places), layers=total, model=model)
            layer = dataclasses.replace(layer, geometry=geometry)
        placed.append(layer)
    return placed


def _positive(skip_layers: Sequence[int], count: int) -> set[int]:
    indices: list[Any] = list(skip_layers)
    for index in indices:
        if type(index) is not int or not -count <= index < count:
            raise ValueError(f"[mlx_kv] expected skip_layers between {-count} and {count - 1}, got {index!r}")
    return {index % count for index in indices}


def _evicts(cache: Any) -> bool:
    return isinstance(cache, CompressedKVCache) and cache.policy.evicts
