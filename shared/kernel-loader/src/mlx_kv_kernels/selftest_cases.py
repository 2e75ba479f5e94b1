"""The cases of this package's kernels for `mlx_kv selftest`."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .accumulate import Noise, Step, accumulate_scores
from .backend import Backend
from .numbers import join_numbers
from .pooling import POOLINGS, Pooling, pool_scores
from .rows import gather_rows, topk_rows
from .selftest import Case
from .window import window_scores

_STEPS = [(1, 100), (4, 1024), (4, 4097), (7, 300), (8, 2049)]


def cases() -> list[Case]:
    """Every variant of topk_rows, the window's scores and accumulated scores; rows copied at every chunk size."""
    return [
        *(Case("topk_rows", f"{rows} rows", _topk(rows)) for rows in (100, 2048, 2049, 32768)),
        *(
            Case("gather_rows", f"{str(dtype).removeprefix('mlx.core.')}, width {width}", _gather(dtype, width))
            for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)
            for width in (128, 81)
        ),
        *(Case("join_numbers", f"{count} numbers", _join(count)) for count in (2, 29)),
        *(
            Case("window_scores", f"{str(dtype).removeprefix('mlx.core.')}, key_dim {dim}", _window(dtype, dim))
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
            for dim in (64, 80, 96, 128, 192, 256)
        ),
        *(
            Case("window_scores", f"{str(dtype).removeprefix('mlx.core.')}, with a bias", _window(dtype, 128, True))
            for dtype in (mx.float32, mx.float16, mx.bfloat16)
        ),
        *(Case("accumulate_scores", f"group {group}, {rows} rows", _accumulate(group, rows)) for group, rows in _STEPS),
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


def _join(count: int) -> Callable[[Backend], None]:
    def run(backend: Backend) -> None:
        values = tuple([i * i - 7 for i in range(count)])
        _expect_equal(join_numbers(values, mx.int32, backend), mx.array(values, mx.int32))

    return run


def _window(dtype: mx.Dtype, dim: int, biased: bool = False) -> Callable[[Backend], None]:
    """Whole numbers have exact dot products, and a row of each head is repeated, so there are ties to be kept."""

    def run(backend: Backend) -> None:
        queries = mx.random.randint(-2, 3, (1, 6, 9, dim), key=mx.random.key(0)).astype(dtype)
        keys = mx.random.randint(-2, 3, (1, 2, 300, dim), key=mx.random.key(1)).astype(dtype)
        keys[:, :, ::3] = keys[:, :, :1]
        sinks = mx.random.normal((6,), key=mx.random.key(2))
        bias = mx.broadcast_to(mx.array([0.5, -1, 0, 2, 0, 1])[None, :, None], (1, 6, 300)) if biased else None
        got, expected = (window_scores(queries, keys, 0.1, sinks, bias, backend=b) for b in (backend, "reference"))
        # sums in another order, and exp2 for exp
        if not mx.allclose(got, expected, rtol=3e-5, atol=1e-7):
            raise ValueError(f"[selftest] expected the reference's scores, off by up to {abs(got - expected).max()}")
        _expect_equal(got[:, :, :289:3], mx.repeat(got[:, :, :1], 97, axis=2))

    return run


def _accumulate(group: int, rows: int) -> Callable[[Backend], None]:
    """Scores are far enough apart for both to drop the same row, in either order of sums."""

    def run(backend: Backend) -> None:
        logits = mx.random.normal((1, 2 * group, rows), key=mx.random.key(0))
        scores = 10 * mx.random.permutation(rows, key=mx.random.key(1)).astype(mx.float32)[None]
        positions = mx.arange(rows, dtype=mx.int32)[None]
        steps, noise = [Step(0, rows, rows, rows - 1, rows - 9, drops=True, temperature=1.5)], Noise(2**32 - 1, 1)
        both = mx.concatenate([scores, scores[:, ::-1]]), mx.concatenate([positions, positions])
        got, expected = (
            accumulate_scores(logits, *both, steps, noise=noise, backend=b) for b in (backend, "reference")
        )
        if not mx.allclose(got[0], expected[0], rtol=3e-5, atol=1e-7):
            raise ValueError(f"[selftest] expected the reference's scores, off by {abs(got[0] - expected[0]).max()}")
        _expect_equal(got[1], expected[1])
        _expect_equal(got[2], expected[2])

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
