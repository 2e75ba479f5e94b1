"""The cases of this package's kernels for `mlx_kv selftest`."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .backend import Backend
from .rows import gather_rows, topk_rows
from .selftest import Case
from .window import POOLINGS, Pooling, pool_scores, window_scores


def cases() -> list[Case]:
    """Every variant of topk_rows and of the window's scores, and gather_rows at every chunk size."""
    return [
        *(Case("topk_rows", f"{rows} rows", _topk(rows)) for rows in (100, 2048, 2049, 32768)),
        *(
            Case("gather_rows", f"{str(dtype).removeprefix('mlx.core.')}, width {width}", _gather(dtype, width))
            for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)
            for width in (128, 81)
        ),
        *(
            Case("window_scores", f"{str(dtype).removeprefix('mlx.core.')}, key_dim {dim}", _window(dtype, dim))
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
            for dim in (64, 80, 96, 128, 192, 256)
        ),
        *(Case("pool_scores", f"{pooling} of {size}", _pool(size, pooling)) for pooling in POOLINGS for size in (1, 7)),
    ]


def _topk(rows: int) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        scores = mx.round(mx.random.normal((2, 2, rows), key=mx.random.key(0)), 1)  # ties
        scores[..., ::17] = float("nan")
        scores[..., ::13] = -float("inf")
        lengths = mx.array([rows, rows // 2])
        for k in (1, rows // 4, rows):
            _expect_equal(
                topk_rows(scores, k, lengths, backend=backend), topk_rows(scores, k, lengths, backend="reference")
            )

    return run


def _gather(dtype: mx.Dtype, width: int) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        rows = mx.random.randint(0, 250, (2, 3, 65, width), key=mx.random.key(0)).astype(dtype)
        indices = mx.sort(mx.random.randint(0, 60, (2, 3, 33), key=mx.random.key(1)), axis=-1)
        for held in (rows, rows[:, :, 3:63]):
            _expect_equal(gather_rows(held, indices, backend=backend), gather_rows(held, indices, backend="reference"))

    return run


def _window(dtype: mx.Dtype, dim: int) -> Callable[[Backend], None]:
    """Whole numbers have exact dot products, and a row of each head is repeated, so there are ties to be kept."""

    def run(backend: Backend) -> None:
        queries = mx.random.randint(-2, 3, (1, 6, 9, dim), key=mx.random.key(0)).astype(dtype)
        keys = mx.random.randint(-2, 3, (1, 2, 300, dim), key=mx.random.key(1)).astype(dtype)
        keys[:, :, ::3] = keys[:, :, :1]
        sinks = mx.random.normal((6,), key=mx.random.key(2))
        got, expected = (window_scores(queries, keys, 0.1, sinks, backend=b) for b in (backend, "reference"))
        # sums in another order, and exp2 for exp
        if not mx.allclose(got, expected, rtol=3e-5, atol=1e-7):
            raise ValueError(f"[selftest] expected the reference's scores, off by up to {abs(got - expected).max()}")
        _expect_equal(got[:, :, :289:3], mx.repeat(got[:, :, :1], 97, axis=2))

    return run


def _pool(size: int, pooling: Pooling) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        votes = mx.random.uniform(shape=(2, 2, 300), key=mx.random.key(0))
        got, expected = (pool_scores(votes, 32, size, pooling, sinks=4, backend=b) for b in (backend, "reference"))
        _expect_equal(got, expected)

    return run


def _expect_equal(got: mx.array, expected: mx.array) -> None:
    if not mx.array_equal(got, expected):
        raise ValueError(
            f"[selftest] expected the reference's result, got {mx.sum(got != expected).item()} other elements"
        )
