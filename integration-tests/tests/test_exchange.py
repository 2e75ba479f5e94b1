"""Steps at a full budget, each one function that MLX compiles, are what they are op by op."""

import copy

import mlx.core as mx
import pytest

from mlx_kv.accumulation import AccumulatingPolicy
from mlx_kv.policy import Policy
from mlx_kv.testing.accumulation_checks import kept
from mlx_kv.testing.driving import SCALE, Tokens, contents, feed, new_cache, random_tokens, same_bits
from mlx_kv_kernels.launch import forget_launches
from mlx_kv_kernels.testing import legs

pytestmark = pytest.mark.needs("h2o", "keyformer", "fused")
METHODS = [
    "h2o(heavy=20, recent=12)",
    "keyformer(budget=32, noise=0.3)",  # a factor whose products are rounded
    "h2o(heavy=0.3, recent=0.2)",  # grows with prompts
]


@pytest.fixture(params=sorted({leg.backend for leg in legs()}))
def backend(request, monkeypatch):
    """Each backend there is that has kernels."""
    monkeypatch.setenv("MLX_KV_BACKEND", request.param)
    return request.param


@pytest.fixture
def launches_of_its_own():
    """Launches of this test serve no other, and those of others not this one."""
    forget_launches()
    yield
    forget_launches()


def op_by_op(cache):
    cache.policy.decode = Policy.decode.__get__(cache.policy)
    return cache


def answered(monkeypatch):
    """Whether each token was answered as one function."""
    found, decode = [], AccumulatingPolicy.decode

    def noted(*arguments):
        output = decode(*arguments)
        found.append(output is not None)
        return output

    monkeypatch.setattr(AccumulatingPolicy, "decode", noted)
    return found


def take(cache, tokens, sinks=None):
    keys, values = cache.update_and_fetch(tokens.keys, tokens.values)
    return cache.attend(tokens.queries, keys, values, SCALE, cache.make_mask(tokens.count), sinks)


def looked_at(cache):
    return cache.nbytes


def copied(cache):
    return copy.deepcopy(cache)


def loaded(cache):
    return type(cache).from_state(cache.state)


def merged(cache):
    return type(cache).merge([cache]).extract(0)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_the_same_to_the_bit(backend, monkeypatch, method, with_sinks):
    """Whatever comes between them."""
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    found = answered(monkeypatch)
    ours, theirs = new_cache(method), op_by_op(new_cache(method))
    prompt = random_tokens(0, 60)
    for cache in (ours, theirs):
        feed(cache, prompt, [40, 19, 1])
    walk = [None, looked_at, None, None, copied, None, loaded, merged, None, None, "chunk", None, None, None, None]
    for i, between in enumerate(walk):
        tokens = random_tokens(100 + i, 41 if between == "chunk" else 1)
        if callable(between):
            after = between(ours)
            if between is not looked_at:
                ours, theirs = after, op_by_op(between(theirs))
        outputs = [take(cache, tokens, sinks) for cache in (ours, theirs)]
        mx.eval(outputs)
        assert same_bits(*outputs), f"step {i} is answered otherwise"
    for cache in (ours, theirs):
        cache.store.settle()
    assert contents(ours.store) == contents(theirs.store)
    for name, array in ours.policy.arrays().items():
        assert same_bits(array, theirs.policy.arrays()[name])
    # The first tokens of each stretch, whose budget may not be full, are taken op by op.
    assert sum(found) >= 6


@pytest.mark.parametrize("method", METHODS)
def test_a_look_between_a_token_and_its_attention_loses_no_row(backend, method):
    ours, theirs = new_cache(method), op_by_op(new_cache(method))
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(8):
        tokens = random_tokens(100 + i, 1)
        keys, values = ours.update_and_fetch(tokens.keys, tokens.values)
        if i in (0, 4):
            assert ours.nbytes
        got = ours.attend(tokens.queries, keys, values, SCALE, None)
        # Rows stand in another order then: sums of float32 attention over some thirty rows.
        assert mx.allclose(got, take(theirs, tokens), rtol=1e-5, atol=1e-5)
    assert kept(ours) == kept(theirs)


def test_tokens_of_another_dtype_are_held_in_the_store_s(backend):
    """As chunks of several are: attention reads the newest beside the others."""
    ours, theirs = new_cache(METHODS[0]), new_cache(METHODS[0])
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(5):
        half = random_tokens(i, 1, mx.float16)
        same = [Tokens(half.queries.astype(mx.float32), *rows) for rows in ((half.keys, half.values), cast(half))]
        assert same_bits(*[take(cache, tokens) for cache, tokens in zip((ours, theirs), same, strict=True)])


def cast(tokens):
    return tokens.keys.astype(mx.float32), tokens.values.astype(mx.float32)


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 64, 64), (4, 64, 64), (2, 32, 64), (2, 64, 128)])
def test_tokens_of_another_shape_are_refused(backend, heads, key_dim, value_dim):
    """And those that follow go on as if they had not come."""
    ours, theirs = new_cache(METHODS[0]), new_cache(METHODS[0])
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(6):
        keys, values = mx.ones((1, heads, 1, key_dim)), mx.ones((1, heads, 1, value_dim))
        with pytest.raises(ValueError, match="expected rows of 2 heads and 64 channels"):
            ours.update_and_fetch(keys, values)
        assert same_bits(*[take(cache, random_tokens(i, 1)) for cache in (ours, theirs)])


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_token_that_was_never_attended_to_is_noticed(backend, steps):
    """Its row has no score: to go on would be to drop the wrong ones."""
    cache = new_cache(METHODS[0])
    feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(steps):
        take(cache, random_tokens(i, 1))
    lost = random_tokens(9, 1)
    cache.update_and_fetch(lost.keys, lost.values)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected \[33\] rows, got \[3[45]\]"):
            take(cache, random_tokens(10, 1))


@pytest.mark.parametrize("shape", [(2,), (8,), (4, 1)])
def test_sinks_of_another_shape_are_refused(backend, shape):
    cache = new_cache(METHODS[0])
    feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(3):
        take(cache, random_tokens(i, 1))
    with pytest.raises(ValueError, match="sinks"):
        take(cache, random_tokens(3, 1), mx.ones(shape))


@pytest.mark.parametrize("method", METHODS)
def test_steps_that_nobody_evaluates_follow_each_other(backend, method):
    """A draft's steps are described together."""
    ours, theirs = new_cache(method), op_by_op(new_cache(method))
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    outputs = [[take(cache, random_tokens(i, 1)) for i in range(6)] for cache in (ours, theirs)]
    mx.eval(outputs)
    assert all(same_bits(*pair) for pair in zip(*outputs, strict=True))


@pytest.mark.usefixtures("launches_of_its_own")
def test_a_case_without_a_kernel_is_taken_op_by_op(backend, monkeypatch):
    """Nothing has changed by then."""
    found = answered(monkeypatch)
    monkeypatch.setattr("mlx_kv_fused_attention.backend.refusal", lambda *case: "there is none")
    ours, theirs = new_cache(METHODS[0]), op_by_op(new_cache(METHODS[0]))
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(4):
        assert same_bits(*[take(cache, random_tokens(i, 1)) for cache in (ours, theirs)])
    assert found
    assert not any(found)


def step_in_ops(queries, layout, scale, of_scores, noisy):
    """What kernels give over one sequence of dense rows of which one goes, in ops that MLX can trace."""
    keys, values, key, value, overdue, taken = layout.arrays
    scores, positions, _, numbers_of_step, _ = of_scores
    held_now, position, window, temperature = (numbers_of_step[i] for i in (1, 3, 4, 6))
    temperature = temperature.view(mx.float32)
    held, split = layout.extent.places[0][4], key.shape[3]
    numbers, count = mx.arange(overdue.shape[2] + 1), taken[-1, 0]
    which = (taken.T[None, :, None] == mx.arange(held)[:, None]) & (numbers < count)  # [1, kv_heads, held, overdue]
    of_overdue = mx.take_along_axis(overdue, mx.argmax(which, axis=3, keepdims=True), axis=2)
    keys, values = (
        mx.concatenate([mx.where(which.any(3, keepdims=True), others, rows[:, :, :held]), newest], axis=2)
        for rows, others, newest in zip(
            (keys, values), (of_overdue[..., :split], of_overdue[..., split:]), (key, value), strict=True
        )
    )
    group = queries.shape[1] // keys.shape[1]
    logits = scale * queries @ mx.repeat(keys, group, 1).swapaxes(2, 3)
    output = mx.softmax(logits, axis=-1) @ mx.repeat(values, group, 1)

    rows = mx.arange(scores.shape[2])[:, None]
    newest, within = rows == held_now - 1, rows < held_now
    shares = mx.softmax(logits / temperature, axis=-1).reshape(1, scores.shape[1], -1, logits.shape[3]).mean(2)
    shares = mx.pad(shares, [(0, 0), (0, 0), (0, scores.shape[2] - shares.shape[2])])[..., None]
    sums = mx.where(newest, 0, scores) + shares
    positions = mx.where(newest, position, positions)
    going = mx.argmin(mx.where(within & (positions < window), sums, float("inf")), axis=2, keepdims=True)
    goes = rows == going
    sums, positions = (mx.where(goes, mx.where(newest, x, 0).sum(2, keepdims=True), x) for x in (sums, positions))
    last = numbers[:, None] == count
    overdue = mx.where(last[:-1], mx.concatenate([key, value], axis=3), overdue)
    taken = mx.where(last, going[0, :, 0, 0], taken) + (numbers[:, None] == numbers[-1])
    return [output, sums, positions, overdue, taken.astype(mx.uint32)]


@pytest.mark.usefixtures("launches_of_its_own")
@pytest.mark.parametrize("method", ["h2o(heavy=20, recent=12)", "keyformer(budget=32, noise=0.0)"])
def test_what_changes_from_step_to_step_is_not_compiled_in(monkeypatch, method):
    """Compiled here as for a GPU, with MLX's ops in place of kernels; beside them the reference."""
    monkeypatch.setattr("mlx_kv.exchange.resolve_backend", lambda: "cuda")
    monkeypatch.setattr("mlx_kv.exchange.attention.exchange", step_in_ops)
    monkeypatch.setattr("mlx_kv.exchange.attention.installed", lambda: True)
    found = answered(monkeypatch)
    ours, theirs = new_cache(method), op_by_op(new_cache(method))
    monkeypatch.setattr("mlx_kv.attention._backends", dict)  # op by op everything is the reference's
    for cache in (ours, theirs):
        feed(cache, random_tokens(0, 60), [59, 1])
    for i in range(40):
        got, expected = (take(cache, random_tokens(i, 1)) for cache in (ours, theirs))
        assert mx.allclose(got, expected, rtol=1e-5, atol=1e-5)  # float32 sums in another order
        assert kept(ours) == kept(theirs)
    assert sum(found) >= 38
