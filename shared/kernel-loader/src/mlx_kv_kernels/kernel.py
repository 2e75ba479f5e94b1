"""One Metal kernel source, launched through Metal, CUDA or the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from . import source
from .backend import resolve_backend
from .launch import CONSTANT_BELOW as CONSTANT_BELOW
from .launch import Launch, Size, TemplateValue, launch_of

SIMD_WIDTH = 32
MAX_THREADS = 1024


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
        helpers: the names of `.metal` files beside it, whose text stands before the kernel's, helpers and body.
    """

    name: str
    package: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    template: tuple[str, ...] = ()
    ensure_row_contiguous: bool = True
    helpers: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        """The name that compilers report, `<name>.metal`."""
        return f"{self.name}.metal"

    @property
    def text(self) -> str:
        """The `.metal` files' text."""
        names = [f"{name}.metal" for name in (*self.helpers, self.name)]
        files = tuple([(name, source.read(self.package, f"kernels/{name}")) for name in names])
        return source.joined(files) if self.helpers else files[0][1]

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

        The arguments are those of `prepare`, with the inputs themselves. Metal and CUDA compile when the outputs are
        evaluated, so that is where a compiler's message appears, with this kernel's file name and line.

        Raises:
            ValueError: as `prepare`.
            UnavailableBackendError: as `prepare`.
        """
        launch = self.prepare(
            inputs=[(x.dtype, x.shape) for x in inputs],
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            template=template,
            init_value=init_value,
            threadgroups_per_core=threadgroups_per_core,
            backend=backend,
        )
        return launch(list(inputs))

    def prepare(
        self,
        *,
        inputs: Sequence[tuple[mx.Dtype, tuple[int, ...]]],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Mapping[str, TemplateValue] | None = None,
        init_value: float | None = None,
        threadgroups_per_core: int | None = None,
        backend: str | None = None,
    ) -> Launch:
        """Return the launch for inputs of these dtypes and shapes; it takes them as a list.

        To be kept, under `launches`, where the same sizes come at every token: working them out costs the host more
        than the launch does.

        `grid` counts threads and is a multiple of `threadgroup`, because Metal cuts the last threadgroup short and
        CUDA does not; a threadgroup has a multiple of 32 threads, 1024 at most. On CUDA `threadgroups_per_core` caps
        the registers so that as many threadgroups fit on one multiprocessor.

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
        return launch_of(
            self,
            self.text,
            backend,
            values,
            tuple(inputs),
            tuple([tuple(shape) for shape in output_shapes]),
            tuple(output_dtypes),
            grid,
            threadgroup,
            init_value,
            (threads, threadgroups_per_core) if backend == "cuda" else (),
        )

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
