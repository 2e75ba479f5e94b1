"""SnapKV's selection: worked examples, the reference against float64, and `select` against the reference."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_kv_kernels.pooling import pool_scores
from mlx_kv_kernels.testing import check_case
from mlx_kv_snapkv import reference, select

SELECTIONS = {"select": lambda *args: select(*args, backend="reference"), "reference": reference.select}


def exact_scores(queries, keys, window, kernel_size, pooling):
    """Pooled votes in float64, before the window: [kv_heads, rows - window]."""
    query_heads, kv_heads, rows = queries.shape[0], keys.shape[0], keys.shape[1]
    half = kernel_size // 2
    pooled = []
    for head in range(kv_heads):
        votes = np.zeros(rows - window)
        for query_head in range(head * query_heads // kv_heads, (head + 1) * query_heads // kv_heads):
            for i, query in enumerate(queries[query_head]):
                scores = keys[head, : rows - window + i + 1] @ query / np.sqrt(len(query))
                weights = np.exp(scores - scores.max())
                votes += (weights / weights.sum())[: rows - window] / (query_heads // kv_heads)
        near = [votes[max(row - half, 0) : row + half + 1] for row in range(rows - window)]
        pooled.append([part.max() if pooling == "max" else part.sum() / kernel_size for part in near])
    return np.array(pooled)


def exact_selection(scores, budget, window):
    """The rows kept, and whether the scores on both sides of the cut are near without being equal."""
    kept, near = [], False
    for head in scores:
        order = np.lexsort((np.arange(len(head)), -head))
        kept.append([*sorted(order[: budget - window].tolist()), *range(len(head), len(head) + window)])
        if 0 < budget - window < len(head):
            inside, outside = head[order[budget - window - 1]], head[order[budget - window]]
            near |= 0 < inside - outside < 1e-5 * inside
    return kept, near


@st.composite
def cases(draw):
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 8))
    window = draw(st.integers(1, 64))
    rows = window + draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dim = draw(st.sampled_from([16, 64]))
    queries = rng.standard_normal((group * kv_heads, window, dim)).astype(np.float32)
    keys = rng.standard_normal((kv_heads, rows, dim)).astype(np.float32)
    budget = draw(st.integers(window, rows))
    kernel_size, pooling = draw(st.sampled_from(range(1, 14, 2))), draw(st.sampled_from(["max", "avg"]))
    return queries, keys, budget, window, kernel_size, pooling


def test_selection_equals_the_oracle():
    """Cuts between scores nearer than 1e-5 that are not equal are left out, at most 1% of the cases."""
    drawn = discarded = 0

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def run(case):
        nonlocal drawn, discarded
        queries, keys, budget, *options = case
        scores = exact_scores(queries.astype(np.float64), keys.astype(np.float64), *options)
        expected, near = exact_selection(scores, budget, options[0])
        drawn += 1
        discarded += near
        if not near:
            for name, selection in SELECTIONS.items():
                kept = selection(mx.array(queries)[None], mx.array(keys)[None], budget, *options)
                assert kept[0].tolist() == expected, name

    run()
    assert drawn >= 300
    assert discarded <= 0.01 * drawn


VOTES = [0.375, 0.3125, 0.0625, 0.5625, 0.0, 0.0]
POOLED = {
    "avg": [0.22916666666666666, 0.25, 0.3125, 0.20833333333333334, 0.1875, 0.0],
    "max": [0.375, 0.375, 0.5625, 0.5625, 0.5625, 0.0],
}


@pytest.mark.parametrize("pooling", POOLED)
def test_pooling_of_the_worked_example(pooling):
    # Both sum in float32.
    np.testing.assert_allclose(reference.pool(mx.array([[VOTES]]), 3, pooling)[0, 0], POOLED[pooling], rtol=1e-6)
    pooled = pool_scores(mx.array([[[*VOTES, 9.0, 9.0]]]), 2, 3, pooling, backend="reference")
    np.testing.assert_allclose(pooled[0, 0], [*POOLED[pooling], np.inf, np.inf], rtol=1e-6)


ATTENTION = [
    [0.1875, 0.125, 0.0625, 0.3125, 0.0, 0.0, 0.3125, 0.0],
    [0.1875, 0.1875, 0.0, 0.25, 0.0, 0.0, 0.1875, 0.1875],
]


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize(
    ("kernel_size", "pooling", "kept"),
    [(3, "avg", [0, 1, 2, 6, 7]), (3, "max", [2, 3, 4, 6, 7]), (1, "max", [0, 1, 3, 6, 7])],
)
def test_selection_of_the_worked_example(selection, kernel_size, pooling, kept):
    """Queries and keys whose softmax is the example's attention: a key's channels are the logits of the two queries."""
    logits = np.log(np.maximum(ATTENTION, 1e-30)).T.astype(np.float32)
    keys = mx.pad(mx.array(logits)[None, None], [(0, 0), (0, 0), (0, 0), (0, 14)])  # 16 channels
    queries = 4 * mx.eye(2, 16)[None, None]  # the scale of 16 channels is 1/4
    assert selection(queries, keys, 5, 2, kernel_size, pooling)[0, 0].tolist() == kept


def test_group_mean_comes_before_pooling():
    per_head = mx.array([[[8.0, 0, 1, 0, 3, 0]], [[0, 2.0, 1, 0, 4, 0]]])
    mean = per_head.mean(axis=0, keepdims=True)
    assert mean[0, 0].tolist() == [4, 1, 1, 0, 3.5, 0]
    assert reference.pool(mean, 3, "max")[0, 0].tolist() == [4, 4, 1, 3.5, 3.5, 3.5]
    averaged = [1.6666666666666667, 2.0, 0.6666666666666666, 1.5, 1.1666666666666667, 1.1666666666666667]
    np.testing.assert_allclose(reference.pool(mean, 3, "avg")[0, 0], averaged, rtol=1e-6)


def random_case(seed, rows=120, window=8, query_heads=4, kv_heads=2):
    keys = mx.random.split(mx.random.key(seed))
    queries = mx.random.normal((1, query_heads, window, 64), key=keys[0])
    return queries, mx.random.normal((1, kv_heads, rows, 64), key=keys[1])


def test_the_selection_follows_the_queries():
    queries, keys = random_case(0)
    other = random_case(1)[0]
    assert select(queries, keys, 40, 8).tolist() != select(other, keys, 40, 8).tolist()


def test_a_key_that_only_the_queries_of_one_kv_head_look_at():
    queries, keys = random_case(2)
    keys[0, 0, 50] = 3 * queries[0, 1].mean(axis=0) / mx.linalg.norm(queries[0, 1].mean(axis=0)) * 8
    kept = select(queries, keys, 16, 8, 1)
    assert 50 in kept[0, 0].tolist()
    assert 50 not in kept[0, 1].tolist()


def whole_numbers(seed, rows=150):
    """Dot products without rounding, and rows that are copies of others: ties."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-2, 3, (1, 2, rows, 64))
    keys[:, :, rng.integers(0, rows, rows // 2)] = keys[:, :, :1]
    queries = rng.integers(-2, 3, (1, 6, 8, 64))
    return mx.array(queries.astype(np.float32)), mx.array(keys.astype(np.float32))


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_ties_go_to_the_lowest_row_on_every_backend(pooling):
    queries, keys = whole_numbers(0)
    for kernel_size in (1, 5):
        for budget in (8, 9, 60, 149, 150):
            arguments = {"queries": queries, "keys": keys, "budget": budget, "window": 8}
            expected = reference.select(queries, keys, budget, 8, kernel_size, pooling)
            arguments.update(kernel_size=kernel_size, pooling=pooling)
            assert select(**arguments, backend="reference").tolist() == expected.tolist()
            check_case(select, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 7}, r"\[snapkv\] expected budget from window 8 to 120 rows, got 7"),
        ({"budget": 121}, r"\[snapkv\] expected budget from window 8 to 120 rows, got 121"),
        ({"window": 9}, r"\[snapkv\] expected queries of the window's 9 rows, got 8"),
        ({"kernel_size": 6}, r"\[snapkv\] expected kernel_size odd, got 6"),
        ({"pooling": "sum"}, r"\[snapkv\] expected pooling in \('max', 'avg'\), got 'sum'"),
    ],
)
def test_select_refuses(changes, message):
    queries, keys = random_case(0)
    with pytest.raises(ValueError, match=message):
        select(**{"queries": queries, "keys": keys, "budget": 40, "window": 8, **changes})
