"""Stores of random rows, and the oracle: what is held, read bit by bit in NumPy, attended to in float64."""

import os
from copy import deepcopy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlx_kv import DenseStore, Geometry, methods
from mlx_kv.spec import Spec
from mlx_kv_kernels import UnavailableBackendError, resolve_backend, source
from mlx_kv_kernels.testing import legs, not_run

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA, the reference's float32 matmuls would round to 10 bits


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("kernels ran on: " + (", ".join(map(str, legs())) or "nothing"))
    for backend, reason in not_run().items():
        terminalreporter.write_line(f"kernels did not run on {backend}: {reason}")


@pytest.fixture
def emulated():
    """Skips a test that only the emulator can run, where it cannot."""
    try:
        resolve_backend("emulator")
    except UnavailableBackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def mutable_texts(monkeypatch):
    """kernel.py binds `read` by name; mutants replace it in its module."""
    monkeypatch.setattr("mlx_kv_fused_attention.kernel.read", lambda *file: source.read(*file))


def numbers(array):
    """The exact values of an array, as float64."""
    if array.dtype == mx.bfloat16:
        return (np.array(array.view(mx.uint16)).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.array(array).astype(np.float64)


def unpacked(words, bits, dim):
    """Codes [..., dim] of packed words: element j of a row at bit bits*j."""
    as_bits = np.unpackbits(np.array(words).view(np.uint8), axis=-1, bitorder="little")
    codes = as_bits[..., : dim * bits].reshape(*words.shape[:-1], dim, bits)
    return (codes.astype(np.int64) << np.arange(bits)).sum(-1)


def held_rows(side, bits, group, per_token, sequence, rows, dim):
    """Rows [heads, rows, dim] of one sequence of one side of a KIVI store, in float64."""
    begin, packed = side.codes.begins[sequence], side.codes.lengths[sequence]
    parts, exact = [], side.exact.lengths[sequence]
    if exact:
        first = side.exact.begins[sequence]
        parts.append(numbers(side.exact.data)[0, :, first : first + exact])
    if packed:
        codes, first = (
            unpacked(np.array(side.codes.data[0])[:, begin : begin + packed], bits, dim),
            side.scale.begins[sequence],
        )
        last = first + (packed if per_token else packed // group)
        scale, minimum = (numbers(buffer.data)[0, :, first:last] for buffer in (side.scale, side.minimum))
        scale, minimum = (np.repeat(x, group, axis=2 if per_token else 1) for x in (scale, minimum))
        parts.append((codes * scale + minimum)[:, exact:])
    newest = rows - packed
    if newest:
        end = side.tail.ends[sequence]
        parts.append(numbers(side.tail.data)[0, :, end - newest : end])
    return np.concatenate(parts, axis=1)


def held(store, sequence):
    """Keys and values [heads, rows, dim] of one sequence, in float64; what waits to be packed is packed in a copy."""
    store, rows = deepcopy(store), store.lengths[sequence]
    store.buffers()
    if isinstance(store, DenseStore):
        sides = (store.keys, store.values)
        return [numbers(s.data)[0, :, s.begins[sequence] : s.begins[sequence] + rows] for s in sides]
    c = store.config
    dims = [side.tail.data.shape[3] for side in (store.keys, store.values)]
    return [
        held_rows(store.keys, c.bits_of_keys, c.group_size, False, sequence, rows, dims[0]),
        held_rows(store.values, c.bits_of_values, c.group_size, True, sequence, rows, dims[1]),
    ]


def oracle(queries, store, scale, sinks=None):
    """Output [batch, query_heads, 1, value_dim], logits (-inf beyond a sequence's rows) and natural lse, in float64."""
    q = numbers(queries)
    batch, query_heads = q.shape[:2]
    longest, outputs, lses = max(store.lengths), [], []
    all_logits = np.full((batch, query_heads, longest), -np.inf)
    for b in range(batch):
        if store.lengths[b] == 0:
            keys, values = np.zeros((1, 0, q.shape[3])), np.zeros((1, 0, store.values.data.shape[3]))
            keys, values = (np.repeat(x, query_heads, axis=0) for x in (keys, values))
        else:
            keys, values = held(store, b)
            keys, values = (np.repeat(x, query_heads // x.shape[0], axis=0) for x in (keys, values))
        logits = scale * (keys @ q[b, :, 0, :, None])[..., 0]
        sink = np.full((query_heads, 1), -np.inf) if sinks is None else numbers(sinks)[:, None]
        scores = np.concatenate([logits, sink], axis=1)
        largest = scores.max(axis=1, keepdims=True)
        largest = np.where(np.isinf(largest), 0, largest)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            lses.append((largest + np.log(total))[:, 0])
        probabilities = weights[:, :-1] / np.where(total > 0, total, 1)
        outputs.append((probabilities[:, None, :] @ values)[:, 0])
        all_logits[b, :, : logits.shape[1]] = logits
    return np.stack(outputs)[:, :, None], all_logits, np.stack(lses)


def config_of(spec):
    """The store that a spec names; skips the test where that method is not installed."""
    name = spec.partition("(")[0]
    if name not in {method.name for method in methods()}:
        pytest.skip(f"mlx-kv-{name}, which packs the rows, is not installed")
    return Spec.parse(spec).store


def filled(spec, lengths, kv_heads, key_dim, value_dim, dtype, seed=0, spread=1.0, of_keys=0.0):
    """A store of `lengths` normal rows; each sequence's newest was appended on its own, as in decoding.

    Three are, so that rows wait to be packed. Keys are normal around `of_keys`, not zero.
    """
    rng = np.random.default_rng(seed)
    store = config_of(spec).create(Geometry(0, kv_heads, kv_heads, key_dim, value_dim))
    longest = max(lengths)

    def rows(count, dim, middle=0.0):
        x = middle + spread * rng.standard_normal((len(lengths), kv_heads, count, dim))
        return mx.array(x.astype(np.float32)).astype(dtype)

    alone = min(3, longest)
    before = [max(n - alone, 0) for n in lengths]
    if longest > alone:
        store.append(
            rows(longest - alone, key_dim, of_keys), rows(longest - alone, value_dim), [(0, n) for n in before]
        )
        store.settle()
    for i in range(alone):
        last = [(0, min(max(n - m - i, 0), 1)) for n, m in zip(lengths, before, strict=True)]
        store.append(rows(1, key_dim, of_keys), rows(1, value_dim), last)
    return store


@dataclass
class Tools:
    """What tests use of this module (test modules cannot import each other)."""

    numbers = staticmethod(numbers)
    held = staticmethod(held)
    oracle = staticmethod(oracle)
    filled = staticmethod(filled)
    config_of = staticmethod(config_of)

    @staticmethod
    def queries(batch, heads, dim, dtype, seed=1):
        x = np.random.default_rng(seed).standard_normal((batch, heads, 1, dim)).astype(np.float32)
        return mx.array(x).astype(dtype)

    @staticmethod
    def error(got, truth):
        """Relative error in the Euclidean norm."""
        return np.linalg.norm(numbers(got) - truth) / max(np.linalg.norm(truth), 1e-30)


@pytest.fixture(scope="session")
def tools():
    return Tools
