"""The kernels' cases for `mlx_kv selftest`: dense rows, which need no other package."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_kv import DenseStore
from mlx_kv_kernels import Backend
from mlx_kv_kernels.accumulate import Step
from mlx_kv_kernels.selftest import Case

from .attend import Attention, attend
from .exchange import exchange
from .merge import merge_splits

_TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 4e-3}  # half types round their output, twice here


def cases() -> list[Case]:
    """Every dtype and head dim of attend over dense rows, merge_splits, and finish_exchange."""
    return [
        *(
            Case("attend_rows", f"dense, {str(dtype).removeprefix('mlx.core.')}, head dim {dim}", _attend(dtype, dim))
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
            for dim in (64, 128, 256)
        ),
        Case("merge_splits", "70 splits, head dim 80", _merge),
        *(
            Case("finish_exchange", f"dense, {str(dtype).removeprefix('mlx.core.')}, head dim 128", _exchange(dtype))
            for dtype in (mx.float32, mx.bfloat16)
        ),
    ]


def _attend(dtype: mx.Dtype, dim: int) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        keys, values, queries = (_normal((2, heads, rows, dim), seed, dtype) for seed, heads, rows in _SHAPES)
        store = DenseStore()
        store.append(keys, values, [(0, 77), (0, 30)])
        layout = store.layout()
        if layout is None:
            raise ValueError("[selftest] expected a layout")
        sinks = _normal((8,), 3, dtype)
        got, truth = (
            attend(queries, layout, dim**-0.5, sinks, logits=True, backend=name) for name in (backend, "reference")
        )
        if not isinstance(got, Attention) or not isinstance(truth, Attention):
            raise ValueError("[selftest] expected logits")
        # MLX's float32 matmul, which the reference uses, rounds its operands to 10 bits on CUDA.
        _expect_close(got.output, truth.output, max(_TOLERANCE[dtype], 2e-3 if backend == "cuda" else 0))
        _expect_close(mx.exp(got.logits - got.lse[..., None]), mx.exp(truth.logits - truth.lse[..., None]), 2e-3)

    return run


_SHAPES = ((0, 2, 77), (1, 2, 77), (2, 8, 1))


def _merge(backend: Backend) -> None:
    outputs, lse = _normal((3, 70, 80), 0, mx.float32), 10 * _normal((3, 70), 1, mx.float32)
    lse[:, ::3] = -float("inf")
    for got, truth in zip(
        merge_splits(outputs, lse, backend=backend), merge_splits(outputs, lse, backend="reference"), strict=True
    ):
        _expect_close(got, truth, 2e-5)


def _exchange(dtype: mx.Dtype) -> Callable[[Backend], None]:
    """A token that takes another's place, where seven before it have taken places too."""

    def run(backend: Backend) -> None:
        keys, values, newest = (_normal((1, 2, rows, 128), seed, dtype) for seed, rows in ((0, 600), (1, 600), (2, 1)))
        queries, overdue = _normal((1, 8, 1, 128), 3, dtype), _normal((1, 2, 32, 256), 4, dtype)
        places = 7 * mx.arange(33)[:, None] + mx.arange(2)
        taken = mx.where(mx.arange(33)[:, None] == 32, 7, places).astype(mx.uint32)
        scores = mx.abs(_normal((1, 2, 600, 1), 5, mx.float32))
        positions = mx.broadcast_to(mx.arange(600)[:, None], scores.shape).astype(mx.int32)
        rows, step = (keys, values, newest, newest, overdue, taken), Step(0, 600, 600, 700, 500, True)
        got, truth = (
            exchange(queries, *rows, 128**-0.5, scores, positions, step, backend=name)
            for name in (backend, "reference")
        )
        for i, tolerance in enumerate((_TOLERANCE[dtype], 2e-5, 0, 0, 0)):
            # MLX's float32 matmul, which the reference uses, rounds its operands to 10 bits on CUDA.
            _expect_close(got[i], truth[i], max(tolerance, 2e-3 if backend == "cuda" and tolerance else 0))

    return run


def _normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _expect_close(got: mx.array, truth: mx.array, tolerance: float) -> None:
    got, truth = got.astype(mx.float32), truth.astype(mx.float32)
    error = float(mx.sqrt(((got - truth) ** 2).sum() / (truth**2).sum()))
    if not error <= tolerance:  # NaN too
        raise ValueError(f"[selftest] expected the reference's result within {tolerance}, got an error of {error}")
