"""`metal_kernel`: mx.fast.metal_kernel on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import arrays, signature
from .abi import ALLOWABLE
from .attributes import entry_point
from .buffers import Argument
from .build import check_types, kernel_library
from .includes import prelude
from .launch import launch
from .report import Triple
from .rewrite import to_cpp
from .settings import Contract, Mode, current_settings

_Scalar = bool | int | float


@dataclass(frozen=True)
class MetalKernel:
    """A kernel made by `metal_kernel`; call it to run it."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    mode: Mode | None
    order: int | None
    contract: Contract | None
    allow: Sequence[str]

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | _Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: signature.Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
        mode: Mode | None = None,
        order: int | None = None,
        contract: Contract | None = None,
    ) -> list[mx.array]:
        """Runs the kernel now and returns its outputs.

        The arguments are those of a kernel from mx.fast.metal_kernel (`stream` is ignored); `mode`, `order` and
        `contract` override the kernel's own and those of `settings`.

        Raises:
            CompileError: the source is no valid Metal.
            EmulatorError: the kernel did something undefined.
            ValueError: the arguments do not fit the kernel.
        """
        used = current_settings().override(self.mode, self.order, self.contract).override(mode, order, contract)
        self._check_counts(len(inputs), len(output_shapes), len(output_dtypes))
        names = [
            (n, x if isinstance(x, mx.array) else mx.array(x)) for n, x in zip(self.input_names, inputs, strict=True)
        ]
        outputs = list(zip(self.output_names, output_dtypes, strict=True))
        parameters = signature.parameters(self.source, names, outputs, self.atomic_outputs)
        function = self._function(parameters, template or [])
        instance = signature.function_name(self.name) + signature.template_arguments(template or [])
        if verbose:
            print(function)
        text = to_cpp(prelude()) + to_cpp(function)
        if used.mode == "strict":
            check_types(self.name, text, instance if template else "")
        path = kernel_library(self.name, text + entry_point(instance, parameters)[0], used.mode, used.contract)
        results = [arrays.output(n, s, d, init_value) for (n, d), s in zip(outputs, output_shapes, strict=True)]
        passed = [argument for name, array in names for argument in self._input(name, array)]
        launch(self.name, path, [*passed, *results], _triple(grid), _triple(threadgroup), used, self.allow)
        return [arrays.to_mlx(r.data, s, d) for r, s, d in zip(results, output_shapes, output_dtypes, strict=True)]

    def _check_counts(self, inputs: int, shapes: int, dtypes: int) -> None:
        for what, expected, got in (
            ("inputs", len(self.input_names), inputs),
            ("output_shapes", len(self.output_names), shapes),
            ("output_dtypes", len(self.output_names), dtypes),
        ):
            if expected != got:
                raise ValueError(f"[metal_kernel] expected {expected} {what} for {self.name!r}, got {got}")

    def _function(self, parameters: list[str], template: signature.Template) -> str:
        """The generated function, as MLX writes it, with #line so that messages name the kernel's own lines."""
        return (
            f'\n#line 1 "{self.name}.header.metal"\n{self.header}\n#line 1 "signature of {self.name}"\n'
            f"{signature.template_header(template)}[[kernel]] void {signature.function_name(self.name)}(\n  "
            + ",\n  ".join(parameters)
            + f') {{\n#line 1 "{self.name}.metal"\n{self.source}\n}}\n'
        )

    def _input(self, name: str, array: mx.array) -> list[Argument]:
        data, strides, offset = arrays.memory(array, self.ensure_row_contiguous)
        arguments = [Argument(name, data, offset=offset)]
        values: dict[str, Any] = {
            "shape": np.array(array.shape, np.int32),
            "strides": np.array(strides, np.int64),
            "ndim": np.array([array.ndim], np.int32),
        }
        if array.ndim:
            arguments += [Argument(f"{name}_{e}", values[e]) for e in signature.shape_arguments(name, self.source)]
        return arguments


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
    *,
    mode: Mode | None = None,
    order: int | None = None,
    contract: Contract | None = None,
    allow: Sequence[str] = (),
) -> MetalKernel:
    """A kernel with the semantics of mx.fast.metal_kernel that runs on the CPU.

    Args:
        name: the kernel's name; reports call its source `<name>.metal` unless the source has a `#line` of its own.
        input_names: parameter names of the inputs.
        output_names: parameter names of the outputs.
        source: the body of the kernel, in MSL.
        header: MSL that goes before the kernel.
        ensure_row_contiguous: copy inputs that are not; otherwise they come with their strides.
        atomic_outputs: outputs are `device atomic<T>*`.
        compile_options: accepted as MLX does and ignored: mathematics is always precise here.
        mode: `run`, `check` or `strict`; None leaves it to `settings`.
        order: 0 or 1, the order in which threads run; None leaves it to `settings`.
        contract: `on` or `off`, whether `a * b + c` may be fused; None leaves it to `settings`.
        allow: kinds of findings that this kernel may have, of `mlx_kv_emulator.ALLOWABLE`.

    Raises:
        ValueError: `allow` names a kind that does not exist or that a launch cannot survive, or there is no output.
    """
    if not output_names:
        raise ValueError(f"[metal_kernel] expected at least one output for {name!r}, got none")
    for kind in allow:
        if kind not in ALLOWABLE:
            raise ValueError(f"[metal_kernel] expected kinds to allow out of {', '.join(ALLOWABLE)}, got {kind!r}")
    return MetalKernel(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        mode,
        order,
        contract,
        tuple(allow),
    )


def _triple(sizes: Sequence[int]) -> Triple:
    if len(sizes) != 3:
        raise ValueError(f"[metal_kernel] expected three sizes for grid and threadgroup, got {len(sizes)}")
    return sizes[0], sizes[1], sizes[2]
