"""Defaults of every launch: from the environment, changed for a block of code by `settings`."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Literal, get_args

Mode = Literal["run", "check", "strict"]
Contract = Literal["on", "off"]


@dataclass(frozen=True)
class Settings:
    """How kernels run.

    Attributes:
        mode: `run` is fast; `check` looks at every memory access; `strict` checks the types of address spaces, then
            runs.
        order: 0 runs threads and threadgroups in ascending order, 1 in descending order.
        contract: `on` lets the compiler fuse `a * b + c` within a statement, `off` does not.
    """

    mode: Mode = "run"
    order: int = 0
    contract: Contract = "on"

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        if self.mode not in get_args(Mode):
            raise ValueError(f"[emulator] expected mode run, check or strict, got {self.mode!r}")
        if self.order not in (0, 1):
            raise ValueError(f"[emulator] expected order 0 or 1, got {self.order!r}")
        if self.contract not in get_args(Contract):
            raise ValueError(f"[emulator] expected contract on or off, got {self.contract!r}")

    def override(self, mode: Mode | None, order: int | None, contract: Contract | None) -> Settings:
        """These settings with every value that is not None replaced."""
        return Settings(
            self.mode if mode is None else mode,
            self.order if order is None else order,
            self.contract if contract is None else contract,
        )


_active: ContextVar[Settings | None] = ContextVar("mlx_kv_emulator_settings", default=None)


def from_environment() -> Settings:
    """Settings from MLX_KV_EMULATOR_MODE, MLX_KV_EMULATOR_ORDER and MLX_KV_EMULATOR_CONTRACT."""
    given = {f.name: os.environ.get(f"MLX_KV_EMULATOR_{f.name.upper()}") for f in fields(Settings)}
    order = given["order"]
    if order is not None and not order.isdecimal():
        raise ValueError(f"[emulator] expected order 0 or 1, got {order!r}")
    return Settings().override(given["mode"], None if order is None else int(order), given["contract"])  # type: ignore[arg-type]


def current_settings() -> Settings:
    """The settings of this thread: those of the innermost `settings` block, else those of the environment."""
    return _active.get() or from_environment()


@contextmanager
def settings(
    *, mode: Mode | None = None, order: int | None = None, contract: Contract | None = None
) -> Generator[Settings]:
    """Changes the settings of this thread inside the `with` block; what is left out stays as it is."""
    token = _active.set(current_settings().override(mode, order, contract))
    try:
        yield current_settings()
    finally:
        _active.reset(token)
