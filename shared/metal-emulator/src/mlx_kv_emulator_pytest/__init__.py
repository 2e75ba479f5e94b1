"""pytest --emulate-metal[=run|check|strict]: every kernel that the code under test makes runs on the emulator.

A package of its own, because pytest loads plugins before anything else: importing this one must not import mlx.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mlx_kv_emulator.settings import Mode

_active = pytest.StashKey[tuple[pytest.MonkeyPatch, "Mode"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option; without it nothing changes."""
    parser.addoption(
        "--emulate-metal",
        nargs="?",
        const="run",
        choices=("run", "check", "strict"),
        default=None,
        help="run kernels of mx.fast.metal_kernel on the CPU, in mode run (the default), check or strict",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replaces mx.fast.metal_kernel before any conftest or test module makes a kernel."""
    mode: Mode | None = early_config.known_args_namespace.emulate_metal
    if mode is None:
        return
    import mlx.core as mx

    from mlx_kv_emulator import UnavailableError, available, metal_kernel

    usable, reason = available()
    if not usable:
        raise UnavailableError(f"--emulate-metal: {reason}")
    patch = pytest.MonkeyPatch()
    patch.setattr(mx.fast, "metal_kernel", metal_kernel)
    # Libraries ask these before they use a kernel of theirs.
    patch.setattr(mx.metal, "is_available", lambda: True)
    patch.setattr(mx, "default_device", lambda: mx.gpu)
    early_config.stash[_active] = patch, mode


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs every test in the chosen mode."""
    active = item.config.stash.get(_active, None)
    if active is None:
        return (yield)
    from mlx_kv_emulator import settings

    with settings(mode=active[1]):
        return (yield)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says in the summary that kernels are emulated."""
    active = config.stash.get(_active, None)
    return f"Metal kernels: emulated in mode {active[1]}" if active else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Puts MLX back."""
    active = config.stash.get(_active, None)
    if active:
        active[0].undo()
