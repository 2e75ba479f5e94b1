"""Runs whole `[[kernel]]` functions of Metal sources, such as those that MLX ships as headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attributes import entry_point
from .buffers import Argument
from .build import check_types, kernel_library
from .errors import CompileError
from .includes import expand
from .launch import launch
from .report import Triple
from .rewrite import FunctionConstants, kernel_parameters, to_cpp
from .settings import Contract, Mode, current_settings


def run_kernel_function(
    source: str,
    kernel: str,
    arguments: Sequence[NDArray[Any] | np.generic | None],
    *,
    threadgroups: Triple,
    threadgroup: Triple,
    template: str = "",
    outputs: Sequence[int] = (),
    function_constants: FunctionConstants | None = None,
    mode: Mode | None = None,
    order: int | None = None,
    contract: Contract | None = None,
    allow: Sequence[str] = (),
) -> list[NDArray[Any]]:
    """Runs one `[[kernel]]` function of an MSL source.

    Args:
        source: MSL; `#include "mlx/..."` finds the headers of the mlx package.
        kernel: the function's name.
        arguments: its buffers in order, as arrays or scalars; None for an optional buffer that is absent. Not changed.
        threadgroups: how many threadgroups to run, in x, y, z.
        threadgroup: threads of a threadgroup.
        template: template arguments as text, such as `"float, 128"`.
        outputs: indices of the arguments that the kernel writes. Their contents count as uninitialised.
        function_constants: values by name.
        mode: as for `metal_kernel`.
        order: as for `metal_kernel`.
        contract: as for `metal_kernel`.
        allow: as for `metal_kernel`.

    Returns:
        The outputs after the launch, in the order of `outputs`.

    Raises:
        CompileError: the source is no valid Metal.
        EmulatorError: the kernel did something undefined.
    """
    used = current_settings().override(mode, order, contract)
    expanded = expand(source, f"{kernel}.metal")
    parameters = kernel_parameters(expanded, kernel)
    instance = f"{kernel}<{template}>" if template else kernel
    call, count = entry_point(instance, parameters)
    if count != len(arguments):
        raise CompileError(f"[{kernel}] expected {count} arguments, got {len(arguments)}")
    text = f'#line 1 "{kernel}.metal"\n' + to_cpp(expanded, function_constants)
    if used.mode == "strict":
        check_types(kernel, text, instance if template else "")
    path = kernel_library(kernel, text + call, used.mode, used.contract)
    passed = [_argument(parameters, i, value, i in outputs) for i, value in enumerate(arguments)]
    x, y, z = (count * size for count, size in zip(threadgroups, threadgroup, strict=True))
    launch(kernel, path, passed, (x, y, z), threadgroup, used, allow)
    return [written.data for i in outputs if (written := passed[i])]


def _argument(
    parameters: Sequence[str], index: int, value: NDArray[Any] | np.generic | None, output: bool
) -> Argument | None:
    if value is None:
        return None
    name = parameters[index].split("[[")[0].split()[-1].lstrip("*&")
    data = np.array(value, copy=True, order="C", ndmin=1)
    return Argument(name, data, writable=output, initialised=not output)
