"""What tells one model from another, for saved caches."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import mlx.core as mx
from mlx import utils

_SAMPLE = 64  # values of each parameter, from all over it: models that agree in all of them hold the same weights


def fingerprint(model: Any) -> str:
    """Return a digest of a model's configuration and of a few values of every parameter.

    Reads a handful of values per parameter, not the weights: cheap next to a forward pass.
    """
    digest = hashlib.sha256(repr(getattr(model, "args", type(model).__name__)).encode())
    parameters = cast("list[tuple[str, mx.array]]", utils.tree_flatten(model.parameters()))
    samples: list[mx.array] = []
    for name, array in parameters:
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        samples.append(array.reshape(-1)[:: max(array.size // _SAMPLE, 1)][: 2 * _SAMPLE].astype(mx.float32))
    if samples:
        digest.update(repr(mx.concatenate(samples).tolist()).encode())
    return digest.hexdigest()[:32]
