"""One Metal kernel source, launched through Metal, CUDA or the emulator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, cast

import mlx.core as mx

from . import source
from .backend import emulator, resolve_backend
from .include import included

TemplateValue = bool | int | mx.Dtype
Size = tuple[int, int, int]

SIMD_WIDTH = 32
MAX_THREADS = 1024
CONSTANT_BELOW = 8  # an input of fewer elements lives in Metal's constant address space


@dataclass(frozen=True)
class Kernel:
    """What mx.fast.metal_kernel needs to know of a kernel, once for all backends.

    Args:
        name: the kernel's name, also the `.metal` file's.
        package: the import package that carries `kernels/<name>.metal`.
        input_names: the inputs, in the order of the call.
        output_names: the outputs, in the order of the call.
        template: the names of the compile-time parameters (int, bool or dtype), in order.
        ensure_row_contiguous: False hands strided inputs over as they are; the body then uses `<input>_strides`.
    """

    name: str
    package: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    template: tuple[str, ...] = ()
    ensure_row_contiguous: bool = True

    @property
    def filename(self) -> str:
        """The name that compilers report, `<name>.metal`."""
        return f"{self.name}.metal"

    @property
    def text(self) -> str:
        """The `.metal` file."""
        return source.read(self.package, f"kernels/{self.filename}")

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Mapping[str, TemplateValue] | None = None,
        init_value: float | None = None,
        threadgroups_per_core: int | None = None,
        backend: str | None = None,
    ) -> list[mx.array]:
        """Launch the kernel; the outputs in the order of `output_names`.

        `grid` counts threads and is a multiple of `threadgroup`, because Metal cuts the last threadgroup short and
        CUDA does not; a threadgroup has a multiple of 32 threads, 1024 at most. Metal and CUDA compile when the
        outputs are evaluated, so that is where a compiler's message appears, with this kernel's file name and line.
        On CUDA `threadgroups_per_core` caps the registers so that as many threadgroups fit on one multiprocessor.

        Raises:
            ValueError: sizes, inputs or template do not fit, or the backend is "reference", which has no kernels.
            UnavailableBackendError: the backend asked for cannot run here.
        """
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        self._check(len(inputs), grid, threadgroup, threads)
        values = _template(self, tuple(template.items()) if template else ())
        backend = resolve_backend(backend)
        if backend == "reference":
            raise ValueError(
                f"[{self.name}] expected a backend that runs kernels, got 'reference': call the reference instead"
            )
        launch = _launch(
            self,
            self.text,
            backend,
            values,
            tuple([(x.dtype, x.shape) for x in inputs]),
            tuple([tuple(shape) for shape in output_shapes]),
            tuple(output_dtypes),
            grid,
            threadgroup,
            init_value,
            (threads, threadgroups_per_core) if backend == "cuda" else (),
        )
        return launch(list(inputs))

    def _check(self, inputs: int, grid: Size, threadgroup: Size, threads: int) -> None:
        if inputs != len(self.input_names):
            raise ValueError(f"[{self.name}] expected inputs {', '.join(self.input_names)}, got {inputs} arrays")
        if not 0 < threads <= MAX_THREADS or threads % SIMD_WIDTH:
            raise ValueError(
                f"[{self.name}] expected a threadgroup of a multiple of {SIMD_WIDTH} threads up to {MAX_THREADS}, "
                f"got {threadgroup}"
            )
        if any([size <= 0 or size % group for size, group in zip(grid, threadgroup, strict=True)]):
            raise ValueError(
                f"[{self.name}] expected grid a positive multiple of threadgroup {threadgroup}, got {grid}"
            )


@cache
def _template(kernel: Kernel, given: tuple[tuple[str, TemplateValue], ...]) -> tuple[tuple[str, TemplateValue], ...]:
    """Check a template and put it in the kernel's order."""
    values = dict(given)
    if set(values) != set(kernel.template):
        raise ValueError(f"[{kernel.name}] expected template {sorted(kernel.template)}, got {sorted(values)}")
    # MLX writes the values into the name of a function.
    if any(isinstance(value, int) and value < 0 for value in values.values()):
        raise ValueError(f"[{kernel.name}] expected template integers of 0 or more, got {values}")
    return tuple((name, values[name]) for name in kernel.template)


class _Launch:
    """A launch of fixed sizes; the second one is compiled by MLX, and from then on costs the host a fraction.

    Not the first: sizes that grow with every token would be compiled in vain.
    """

    def __init__(self, function: Callable[[list[mx.array]], list[mx.array]], compiles: bool) -> None:
        self._function = function
        self._first = compiles

    def __call__(self, inputs: list[mx.array]) -> list[mx.array]:
        if self._first:
            self._first = False
            outputs = self._function(inputs)
            self._function = mx.compile(self._function)
            return outputs
        return self._function(inputs)


@lru_cache(1024)
def _launch(
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
) -> _Launch:
    types = tuple((dtype, len(shape) == 0, prod(shape) < CONSTANT_BELOW) for dtype, shape in inputs)
    launch = _build(kernel, text, backend, template, types, output_dtypes, bounds)
    sizes: dict[str, Any] = {"grid": grid, "threadgroup": threadgroup, "init_value": init_value}
    sizes |= {"output_shapes": list(output_shapes), "output_dtypes": list(output_dtypes), "template": list(template)}
    # The emulator runs while Python does: there is nothing to compile.
    return _Launch(lambda arrays: launch(inputs=arrays, **sizes), compiles=backend != "emulator")


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
