"""What a cache holds, ready to be shown or written as JSON, and the machine it was measured on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_kv import memory_report
from mlx_kv_cli.lm import Cache

PACKAGES = ("mlx", "mlx-lm", "mlx-kv", "mlx-kv-cli")


@dataclass(frozen=True)
class Uncompressed:
    """Layers that mlx-lm's own cache serves, for one reason."""

    reason: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheReport:
    """Bytes of a cache after a run. ratio: fp16_bytes / bytes_held, None for an empty cache."""

    bytes_held: int
    fp16_bytes: int
    ratio: float | None
    not_compressed: tuple[Uncompressed, ...]
    layers: tuple[dict[str, Any], ...]


def cache_report(cache: Cache) -> CacheReport:
    """Measure a cache with `mlx_kv.memory_report`; the layers left uncompressed are grouped by their reason."""
    report = memory_report(cache)
    reasons: dict[str, list[int]] = {}
    for layer in report.layers:
        if layer.reason is not None:
            reasons.setdefault(layer.reason, []).append(layer.layer)
    return CacheReport(
        bytes_held=report.bytes_held,
        fp16_bytes=report.fp16_bytes,
        ratio=report.fp16_bytes / report.bytes_held if report.bytes_held else None,
        not_compressed=tuple(Uncompressed(reason, tuple(layers)) for reason, layers in reasons.items()),
        layers=tuple(asdict(layer) for layer in report.layers),
    )


def environment() -> dict[str, str]:
    """The machine and the versions that a measurement depends on."""
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    device = mx.default_device()
    name = platform.processor() or platform.machine()
    if device.type == mx.DeviceType.gpu:
        name = str(mx.device_info().get("device_name", name))
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": f"{device.type.name}: {name}",
        **versions,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def megabytes(count: int) -> str:
    """1_500_000 -> "1.5 MB"."""
    return f"{count / 1e6:,.1f} MB"


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(_range(group) for group in groups)


def _range(group: Sequence[int]) -> str:
    return str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
