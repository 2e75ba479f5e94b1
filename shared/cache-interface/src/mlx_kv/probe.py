"""Which layers of a model are fit for compression, found by watching two forward passes that are never computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .attention import Mask
from .errors import UnsupportedModelError
from .seam import SeamCache, connect, observing
from .store import Geometry

NO_SEAM = "its attention does not go through mlx-lm's scaled_dot_product_attention"


@dataclass(frozen=True)
class Layer:
    """What the probe found about one entry of the model's cache list."""

    geometry: Geometry | None
    """The layer's shape, if it can be compressed."""
    reason: str = ""
    """Why it cannot."""
    shares: bool = False
    """Whether another layer uses its keys and values."""


@dataclass
class _Watch:
    """What all recording caches of one probe share."""

    owners: dict[int, _Recorder] = field(default_factory=dict["int", "_Recorder"])  # by id of a returned array
    returned: list[mx.array] = field(default_factory=list["mx.array"])  # kept alive, so that an id stays unique
    masks: list[mx.array] = field(default_factory=list["mx.array"])  # plain causal masks that recording caches made

    def share(self, *used: mx.array, by: _Recorder | None = None) -> None:
        """Note arrays that are used by another layer than the one whose cache returned them."""
        for array in used:
            owner = self.owners.get(id(array), by)
            if owner is not None and owner is not by:
                owner.shares = True
                if by is not None:
                    by.shares = True


class _Recorder(SeamCache):
    """Mlx-lm's cache, with notes on how the model uses it."""

    def __init__(self, watch: _Watch) -> None:
        self.own: Any = KVCache()
        self.watch = watch
        self.pending: tuple[mx.array, mx.array] | None = None
        self.problem = ""
        self.shares = False
        self.shape: tuple[int, int, int, int] | None = None  # query heads, KV heads, key dim, value dim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.pending is not None:
            self.problem = NO_SEAM
        returned: tuple[mx.array, mx.array] = self.own.update_and_fetch(keys, values)
        self.pending = returned
        for array in returned:
            self.watch.returned.append(array)
            self.watch.owners[id(array)] = self
        return returned

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        self.shares = True
        return self.own.keys_and_values()

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        mask = self.own.make_mask(*args, **kwargs)
        if isinstance(mask, mx.array) and kwargs.get("window_size") is None:
            self.watch.masks.append(mask)
        return mask

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        self.watch.share(keys, values, by=self)
        if self.pending is None:
            self.problem = self.problem or "it attends without appending to its cache"
        elif keys is not self.pending[0] or values is not self.pending[1]:
            self.problem = self.problem or "the model changes keys or values after the cache returned them"
        elif isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            self.problem = "its attention has an additive mask"
        elif isinstance(mask, mx.array) and not any(mask is known for known in self.watch.masks):
            self.problem = "its mask is not the cache's own causal mask (a sliding window, for example)"
        if self.pending is not None:
            k, v = self.pending
            self.shape = queries.shape[1], k.shape[1], k.shape[3], v.shape[3]
        self.pending = None
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def probe(model: Any, caches: list[Any]) -> list[Layer]:
    """Find the layers that can be compressed: each append is followed by the seam's attention over the same arrays.

    Args:
        model: an mlx-lm model.
        caches: a fresh cache list as the model makes it.

    Raises:
        UnsupportedModelError: if no layer qualifies, with the reasons.
    """
    connect()
    watch = _Watch()
    watched = [_Recorder(watch) if type(cache) is KVCache else cache for cache in caches]
    for tokens in ([[0, 0, 0]], [[0]]):
        try:
            with observing(watch.share):  # a layer may use another's keys and values without any cache
                model(mx.array(tokens), cache=watched)
        except Exception as error:  # whatever a model raises, the user must hear that it is the model's
            raise UnsupportedModelError(
                f"[mlx_kv] the model's forward pass failed while it was being probed: {error!r}"
            ) from error
    layers = [_judge(index, cache) for index, cache in enumerate(watched)]
    if all(layer.geometry is None for layer in layers):
        raise UnsupportedModelError(
            f"[mlx_kv] no layer of {type(model).__module__} can be compressed: {summary(layers)}"
        )
    return layers


def summary(layers: list[Layer]) -> str:
    """Say in one line which layers are left out and why."""
    reasons: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.geometry is None:
            reasons.setdefault(layer.reason, []).append(index)
    return "; ".join(f"layers {_ranges(indices)}: {reason}" for reason, indices in reasons.items())


def _judge(index: int, cache: Any) -> Layer:
    if not isinstance(cache, _Recorder):
        return Layer(None, f"it uses a {type(cache).__name__}, which stays as it is")
    if cache.pending is not None:
        return Layer(None, NO_SEAM)
    if cache.shares:
        return Layer(None, "it shares keys and values with another layer", shares=True)
    if cache.problem:
        return Layer(None, cache.problem)
    if cache.shape is None:
        return Layer(None, "the model does not use its cache")
    return Layer(Geometry(index, *cache.shape))


def _ranges(indices: list[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
