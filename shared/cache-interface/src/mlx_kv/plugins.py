"""The methods that are installed, found through the entry-point group `mlx_kv.methods`."""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol, cast

from .errors import SpecError
from .policy import Policy
from .store import Geometry, Store

GROUP = "mlx_kv.methods"


class Method(Protocol):
    """A method's config: a frozen dataclass whose fields are its options, with the class attribute `kind`.

    `create` makes the store or policy of one layer and raises ValueError where the layer's geometry does not fit.
    """

    kind: Literal["store", "policy"]

    def create(self, geometry: Geometry) -> Store | Policy:
        """Make the store or the policy of one layer."""
        ...


@dataclasses.dataclass(frozen=True)
class MethodInfo:
    """An installed method: its options with their defaults, or why it could not be loaded."""

    name: str
    kind: str
    distribution: str
    version: str
    summary: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    error: str | None = None


def methods() -> list[MethodInfo]:
    """Return every installed method by name; a broken package is named with its error and takes no other down."""
    return [_describe(point) for point in sorted(_points().values(), key=lambda point: point.name)]


def load_method(name: str) -> type[Method]:
    """Return the config class of a method.

    Raises:
        SpecError: if no installed package provides it, or the package cannot be imported.
    """
    point = _points().get(name)
    if point is None:
        raise SpecError(f"[mlx_kv] no method {name!r} is installed; installed are {', '.join(sorted(_points()))}")
    try:
        return _load(point)
    except Exception as error:  # whatever a broken package raises, it must be named
        raise SpecError(f"[mlx_kv] method {name!r} of {_owner(point)[0]} cannot be loaded: {error!r}") from error


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each distribution that provides one of the methods."""
    return dict(_owner(_points()[name]) for name in names)


@cache
def _load(point: EntryPoint) -> type[Method]:
    return cast("type[Method]", point.load())


@cache  # it reads the metadata of every distribution: milliseconds, and for every cache that is made
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _owner(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist else (point.value, "unknown")


def _describe(point: EntryPoint) -> MethodInfo:
    distribution, version = _owner(point)
    try:
        config = _load(point)
        fields = dataclasses.fields(cast("Any", config))
        options = {field.name: field.default for field in fields}
        summary = (config.__doc__ or "").strip().split("\n")[0]
        return MethodInfo(point.name, config.kind, distribution, version, summary, options)
    except Exception as error:  # as above
        return MethodInfo(point.name, "unknown", distribution, version, error=repr(error))
