"""An op on every usable backend against its reference, and both against an oracle in float64."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..backend import Backend, backends, emulator

Arguments = Mapping[str, Any]
Array = np.ndarray[Any, Any]

# Two orders of threads in `check` mode, since a race may hide in one. Both roundings of `a * b + c` run, each in one
# compiled object: `strict` and `run` share one, the two checks the other.
_EMULATED: tuple[dict[str, Any], ...] = (
    {"mode": "strict", "contract": "off"},
    {"mode": "run", "contract": "off"},
    {"mode": "check", "order": 0},
    {"mode": "check", "order": 1},
)


@dataclass(frozen=True)
class Leg:
    """One way to run a kernel: a backend, for the emulator with its settings."""

    backend: Backend
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """For the ids of tests and for messages."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.settings)])

    @contextmanager
    def active(self) -> Generator[None]:
        """The emulator's settings, while the block runs."""
        if self.backend == "emulator":
            with emulator().settings(**dict(self.settings)):
                yield
        else:
            yield


def legs() -> list[Leg]:
    """Every way to run a kernel here: the emulator in strict, run and check mode (two thread orders), Metal, CUDA."""
    usable = {name for name, (runs, _) in backends().items() if runs}
    emulated = [Leg("emulator", tuple(chosen.items())) for chosen in _EMULATED] if "emulator" in usable else []
    return emulated + [Leg(name) for name in ("metal", "cuda") if name in usable]


def not_run() -> dict[Backend, str]:
    """The backends that cannot run here, with the reason; for a test session's summary."""
    return {name: reason for name, (runs, reason) in backends().items() if not runs}


def check_parity(
    op: Callable[..., Any],
    arguments: st.SearchStrategy[Arguments],
    *,
    oracle: Callable[..., Any] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    oracle_rtol: float = 0.0,
    oracle_atol: float = 0.0,
    examples: int = 30,
    on: Sequence[Leg] | None = None,
) -> None:
    """`check_case` over `examples` drawn by hypothesis; `arguments` draws the keyword arguments of `op`."""

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(arguments)
    def run(drawn: Arguments) -> None:
        check_case(
            op, drawn, oracle=oracle, rtol=rtol, atol=atol, oracle_rtol=oracle_rtol, oracle_atol=oracle_atol, on=on
        )

    run()


def check_case(
    op: Callable[..., Any],
    arguments: Arguments,
    *,
    oracle: Callable[..., Any] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    oracle_rtol: float = 0.0,
    oracle_atol: float = 0.0,
    on: Sequence[Leg] | None = None,
) -> None:
    """Run `op(**arguments, backend=...)` on every leg (default: `legs()`) and compare.

    Each result has the shapes, the dtypes and, within rtol and atol, the values of `op(..., backend="reference")`;
    without tolerances the values are equal (NaN to NaN). The reference agrees with `oracle(**arguments)` within
    oracle_rtol and oracle_atol; the oracle is given arrays of numbers as NumPy float64, integers as they are.

    Raises:
        AssertionError: a result differs; the message names the leg.
        ValueError: no leg runs here, so nothing would be checked.
    """
    on = legs() if on is None else on
    if not on:
        raise ValueError(f"[testing] expected a backend that runs kernels, got none: {not_run()}")
    expected = _outputs(op(**arguments, backend="reference"))
    if oracle is not None:
        truth = _outputs(oracle(**{name: _exact(value) for name, value in arguments.items()}))
        _compare("the reference", "the oracle", expected, truth, oracle_rtol, oracle_atol)
    for leg in on:
        with leg.active():
            got = _outputs(op(**arguments, backend=leg.backend))
            mx.eval(*got)  # pyright: ignore[reportUnknownMemberType]
        for index, (x, y) in enumerate(zip(got, expected, strict=True)):
            if x.dtype != y.dtype:
                raise AssertionError(f"{leg}: output {index} is {x.dtype}, the reference's is {y.dtype}")
        _compare(str(leg), "the reference", got, expected, rtol, atol)


def _compare(name: str, other: str, got: list[Any], expected: list[Any], rtol: float, atol: float) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        x, y = _exact(a), _exact(b)
        if x.shape != y.shape:
            raise AssertionError(f"{name}: output {index} has shape {x.shape}, {other}'s is {y.shape}")
        with np.errstate(all="ignore"):
            near = (x == y) | ((x != x) & (y != y)) | (np.abs(x - y) <= atol + rtol * np.abs(y)) & (rtol + atol > 0)
        if not near.all():
            first = tuple(int(i) for i in np.argwhere(~near)[0])
            raise AssertionError(
                f"{name} and {other} differ in {int((~near).sum())} of {near.size} elements of output {index}; "
                f"at {first}: {x[first]} and {y[first]}"
            )


def _outputs(result: Any) -> list[Any]:
    return list(cast("Sequence[Any]", result)) if isinstance(result, tuple | list) else [result]


def _exact(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    if value.dtype == mx.bfloat16:  # bits, so that no device flushes a denormal on the way
        return (np.array(value.view(mx.uint16)).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    x: Array = np.array(value)
    return x.astype({"f": np.float64, "b": np.uint8}.get(x.dtype.kind, x.dtype))
