"""Launches of kernels: built once for each variant, and kept for each size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from . import source
from .backend import emulator
from .include import included

if TYPE_CHECKING:
    from .kernel import Kernel

TemplateValue = bool | int | mx.Dtype
Size = tuple[int, int, int]

CONSTANT_BELOW = 8  # an input of fewer elements lives in Metal's constant address space


class Launch:
    """A launch, or several; from the second call on it is compiled by MLX, and costs the host a fraction.

    Not at the first: what nobody asks for again would be compiled in vain.
    """

    def __init__(self, function: Callable[[list[mx.array]], list[mx.array]], compiles: bool) -> None:
        """Take what launches, and whether MLX can compile it."""
        self._function = function
        self._first = compiles

    def __call__(self, inputs: list[mx.array]) -> list[mx.array]:
        """Launch."""
        if self._first:
            outputs = self._function(inputs)
            self._function, self._first = mx.compile(self._function), False
            return outputs
        return self._function(inputs)


_P = ParamSpec("_P")
_T = TypeVar("_T")
_kept: list[Callable[[], None]] = []


def launches(prepare: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that prepares launches: what it returns is kept for the same arguments, 256 at most.

    A backend among them has been resolved: "auto" may mean another one the next time.
    """
    kept = lru_cache(256)(prepare)
    _kept.append(kept.cache_clear)
    return cast("Callable[_P, _T]", kept)


def forget_launches() -> None:
    """Forget what `launches` has kept: for tests, which change kernels' texts."""
    for clear in _kept:
        clear()


@lru_cache(1024)
def launch_of(
    kernel: Kernel,
    text: str,
    backend: str,
    template: tuple[tuple[str, TemplateValue], ...],
    inputs: tuple[tuple[mx.Dtype, tuple[int, ...]], ...],
    output_shapes: tuple[tuple[int, ...], ...],
    output_dtypes: tuple[mx.Dtype, ...],
    grid: Size,
    threadgroup: Size,
    init_value: float | None,
    bounds: tuple[int | None, ...],
) -> Launch:
    """Return the launch of these sizes, in which everything has been checked; see `Kernel.prepare`."""
    types = tuple((dtype, len(shape) == 0, prod(shape) < CONSTANT_BELOW) for dtype, shape in inputs)
    launch = _build(kernel, text, backend, template, types, output_dtypes, bounds)
    sizes: dict[str, Any] = {"grid": grid, "threadgroup": threadgroup, "init_value": init_value}
    sizes |= {"output_shapes": list(output_shapes), "output_dtypes": list(output_dtypes), "template": list(template)}
    # The emulator runs while Python does: there is nothing to compile.
    return Launch(lambda arrays: launch(inputs=arrays, **sizes), compiles=backend != "emulator")


@cache
def _build(
    kernel: Kernel,
    text: str,
    backend: str,
    template: tuple[tuple[str, TemplateValue], ...],
    inputs: tuple[tuple[mx.Dtype, bool, bool], ...],
    outputs: tuple[mx.Dtype, ...],
    bounds: tuple[int | None, ...],
) -> Callable[..., list[mx.array]]:
    """The launcher of one variant. MLX looks compiled kernels up by name alone, so the name says all that differs."""
    language = "cuda" if backend == "cuda" else "metal"
    header, body = source.compose(text, kernel.filename, language, tuple(bound for bound in bounds if bound))
    digest = hashlib.sha256(repr((header, body, template, inputs, outputs)).encode()).hexdigest()[:12]
    variant = "_".join(_word(value) for _, value in template)
    if backend == "cuda":
        header, body = included(f"{kernel.name}_{digest}", header, body, kernel.input_names)
    make: Any = {"metal": mx.fast.metal_kernel, "cuda": mx.fast.cuda_kernel}.get(backend)
    if make is None:
        make = emulator().metal_kernel
    return cast(
        Callable[..., list[mx.array]],
        make(
            name="_".join(part for part in (kernel.name, variant, digest) if part),
            input_names=list(kernel.input_names),
            output_names=list(kernel.output_names),
            header=header,
            source=body,
            ensure_row_contiguous=kernel.ensure_row_contiguous,
        ),
    )


def _word(value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return str(value).removeprefix("mlx.core.")
    return str(int(value))
