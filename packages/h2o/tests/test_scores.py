"""column_sums and select on every backend, against the reference and float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv_h2o import column_sums, reference, select
from mlx_kv_kernels.testing import array, check_case

# float32 sums of some hundred probabilities, in another order than the oracle's; exp2 for exp.
RTOL, ATOL = 3e-5, 1e-7


def oracle(queries, keys, scale):
    chunk, rows = queries.shape[2], keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    logits = scale * queries @ np.repeat(keys, group, axis=1).swapaxes(2, 3)
    logits = np.where(np.tril(np.ones((chunk, rows), bool), rows - chunk), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights.sum(2).reshape(len(queries), keys.shape[1], group, rows).mean(2)


@pytest.mark.parametrize(
    ("dtype", "group", "chunk", "rows"),
    [(mx.float32, 4, 20, 50), (mx.bfloat16, 3, 33, 33)],
)
def test_column_sums(dtype, group, chunk, rows):
    arguments = {
        "queries": array("normal", 0, (1, 2 * group, chunk, 16), dtype),
        "keys": array("normal", 1, (1, 2, rows, 16), dtype),
        "scale": 0.3,
    }
    check_case(column_sums, arguments, oracle=oracle, rtol=RTOL, atol=ATOL, oracle_rtol=RTOL, oracle_atol=ATOL)
    np.testing.assert_allclose(
        column_sums(**arguments, backend="reference"), reference.column_sums(**arguments), rtol=RTOL, atol=ATOL
    )


def test_chunks_add_up():
    queries, keys = array("normal", 0, (1, 4, 100, 64)), array("normal", 1, (1, 2, 100, 64))
    whole = column_sums(queries, keys, 0.125)
    parts = mx.zeros_like(whole)
    for first, last in ((0, 40), (40, 41), (41, 100)):
        parts[..., :last] += column_sums(queries[:, :, first:last], keys[:, :, :last], 0.125)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)  # float32


def test_select():
    scores = array("ties", 0, (2, 3, 50))
    for heavy, recent in ((1, 0), (10, 5), (0, 7), (45, 5)):
        check_case(select, {"scores": scores, "heavy": heavy, "recent": recent})
        expected = reference.select(scores, heavy, recent)
        assert select(scores, heavy, recent).tolist() == expected.tolist()


@pytest.mark.parametrize(("heavy", "recent"), [(0, 0), (-1, 4), (5, -1), (30, 21)])
def test_select_refuses(heavy, recent):
    message = rf"\[h2o\] expected heavy \+ recent from 1 to 50 rows, got {heavy} \+ {recent}"
    with pytest.raises(ValueError, match=message):
        select(mx.zeros((1, 1, 50)), heavy, recent)
