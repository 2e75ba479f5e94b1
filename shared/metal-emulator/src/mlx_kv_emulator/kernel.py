"""`metal_kernel`: mx.fast.metal_kernel on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import signature
from .abi import ALLOWABLE
from .attributes import entry_point
from .buffers import Argument, poisoned
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
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        names = list(zip(self.input_names, arrays, strict=True))
        outputs = list(zip(self.output_names, output_dtypes, strict=True))
        parameters = signature.parameters(self.source, names, outputs, self.atomic_outputs)
        function, strict = self._texts(parameters, template or [])
        if verbose:
            print(function)
        if used.mode == "strict":
            check_types(self.name, strict)
        call, _ = entry_point(signature.function_name(self.name) + signature.template_arguments(template or []), parameters)
        path = kernel_library(self.name, to_cpp(prelude()) + to_cpp(function) + call, used.mode, used.contract)
        results = [_output(n, s, d, init_value) for (n, d), s in zip(outputs, output_shapes, strict=True)]
        passed = [argument for name, array in names for argument in self._input(name, array)]
        launch(self.name, path, [*passed, *results], _triple(grid), _triple(threadgroup), used, self.allow)
        return [_to_mlx(r.data, s, d) for r, s, d in zip(results, output_shapes, output_dtypes, strict=True)]

    def _check_counts(self, inputs: int, shapes: int, dtypes: int) -> None:
        for what, expected, got in (
            ("inputs", len(self.input_names), inputs),
            ("output_shapes", len(self.output_names), shapes),
            ("output_dtypes", len(self.output_names), dtypes),
        ):
            if expected != got:
                raise ValueError(f"[metal_kernel] expected {expected} {what} for {self.name!r}, got {got}")

    def _texts(self, parameters: list[str], template: signature.Template) -> tuple[str, str]:
        """The generated function, and a program for strict mode in which it is instantiated."""
        name = signature.function_name(self.name)
        function = (
            f'\n#line 1 "{self.name}.header.metal"\n{self.header}\n#line 1 "signature of {self.name}"\n'
            f"{signature.template_header(template)}[[kernel]] void {name}(\n  " + ",\n  ".join(parameters) + ") {\n"
            f'#line 1 "{self.name}.metal"\n{self.source}\n}}\n'
        )
        instance = name + signature.template_arguments(template)
        instantiate = f"template decltype({instance}) {instance};\n" if template else ""
        return function, to_cpp(prelude()) + to_cpp(function) + instantiate

    def _input(self, name: str, array: mx.array) -> list[Argument]:
        data, strides, offset = _memory(array, self.ensure_row_contiguous)
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


def _to_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    """A view of an array's memory, strides included."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _memory(array: mx.array, row_contiguous: bool) -> tuple[np.ndarray[Any, Any], list[int], int]:
    """The memory that an array spans, its strides in elements, and the offset of its first element in bytes."""
    view = _to_numpy(array)
    if row_contiguous:
        view = np.ascontiguousarray(view)
    itemsize = view.itemsize
    strides = [stride // itemsize for stride in view.strides]
    if view.flags.c_contiguous:
        return view.reshape(-1), strides, 0
    reach = [stride * (size - 1) for stride, size in zip(strides, view.shape, strict=True)]
    first = -sum(r for r in reach if r < 0)
    memory = np.zeros(first + sum(r for r in reach if r > 0) + 1, view.dtype)
    np.lib.stride_tricks.as_strided(memory[first:], view.shape, view.strides)[...] = view
    return memory, strides, first * itemsize


def _output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Argument:
    data = poisoned(int(np.prod(shape)), signature.numpy_dtype(dtype))
    if init_value is not None:
        data[...] = _to_numpy(mx.array(init_value, dtype))
    return Argument(name, data, writable=True, initialised=init_value is not None)


def _to_mlx(data: np.ndarray[Any, Any], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    array = mx.array(data.reshape(tuple(shape)))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
