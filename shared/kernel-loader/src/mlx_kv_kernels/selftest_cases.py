"""The cases of topk_rows and gather_rows for `mlx_kv selftest`."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .backend import Backend
from .rows import gather_rows, topk_rows
from .selftest import Case


def cases() -> list[Case]:
    """Every variant of topk_rows, and gather_rows at every chunk size."""
    return [
        *(Case("topk_rows", f"{rows} rows", _topk(rows)) for rows in (100, 2048, 2049, 32768)),
        *(
            Case("gather_rows", f"{str(dtype).removeprefix('mlx.core.')}, width {width}", _gather(dtype, width))
            for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)
            for width in (128, 81)
        ),
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


def _expect_equal(got: mx.array, expected: mx.array) -> None:
    if not mx.array_equal(got, expected):
        raise ValueError(
            f"[selftest] expected the reference's result, got {mx.sum(got != expected).item()} other elements"
        )
