"""Runs Metal kernels on any CPU, with race checks: mx.fast.metal_kernel for tests."""

import contextlib

import mlx.core as mx

from . import _first

CompileError = EmulatorError = _first.MSLError
_settings = {"mode": "run", "order": 0, "contract": "on"}


@contextlib.contextmanager
def settings(**values):
    before = dict(_settings)
    _settings.update({k: v for k, v in values.items() if v is not None})
    try:
        yield
    finally:
        _settings.update(before)


def available():
    return True, ""


def metal_kernel(name, input_names, output_names, source, header="", ensure_row_contiguous=True, atomic_outputs=False,
                 *, mode=None, order=None, contract=None, allow=()):
    own = {"mode": mode, "order": order, "contract": contract}

    def call(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None, verbose=False,
             stream=None, mode=None, order=None, contract=None):
        over = dict(_settings)
        over.update({k: v for k, v in own.items() if v is not None})
        over.update({k: v for k, v in {"mode": mode, "order": order, "contract": contract}.items() if v is not None})
        args = (name, input_names, output_names, source, header, inputs, template, grid, threadgroup, output_shapes,
                output_dtypes)
        kw = dict(init_value=init_value, ensure_row_contiguous=ensure_row_contiguous, atomic_outputs=atomic_outputs,
                  verbose=verbose)
        if over["mode"] == "strict":
            code, text = _first.emulate_metal(*args, **kw, **over)
            if code:
                raise CompileError(text)
            over["mode"] = "run"
        result = _first.emulate_metal(*args, **kw, **over)
        if over["mode"] == "check" and _first.STATS["last"]["unwritten"] and "unwritten" not in allow:
            raise EmulatorError(f"{name}: {_first.STATS['last']['unwritten']} bytes of the outputs were never written")
        return result

    return call
