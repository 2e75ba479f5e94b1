"""Driving caches without a model: random tokens, the calls a model makes, and what a cache holds afterwards."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
import numpy as np

from ..cache import CompressedKVCache
from ..spec import Spec
from ..store import Geometry, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

GEOMETRY = Geometry(layer=0, query_heads=4, kv_heads=2, key_dim=64, value_dim=64)
"""A small layer whose head dim fits every method."""

SCALE = GEOMETRY.key_dim**-0.5


class ConformanceError(AssertionError):
    """A method breaks a rule of the cache protocol; the message says which."""


def fail(spec: str, message: str) -> NoReturn:
    """Raise ConformanceError with the spec in front."""
    raise ConformanceError(f"[{spec}] {message}")


def expect(condition: object, spec: str, message: str) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not condition:
        fail(spec, message)


@dataclass(frozen=True)
class Tokens:
    """Queries [1, query_heads, n, key_dim], keys [1, kv_heads, n, key_dim] and values [1, kv_heads, n, value_dim]."""

    queries: mx.array
    keys: mx.array
    values: mx.array

    def __getitem__(self, tokens: slice) -> Tokens:
        """Return some of the tokens."""
        return Tokens(self.queries[:, :, tokens], self.keys[:, :, tokens], self.values[:, :, tokens])

    @property
    def count(self) -> int:
        """How many tokens these are."""
        return self.keys.shape[2]


def random_tokens(seed: int, count: int, dtype: mx.Dtype = mx.float32) -> Tokens:
    """Return tokens for `GEOMETRY`; the keys have a few large channels, as real ones do."""
    g = GEOMETRY
    keys = mx.random.split(mx.random.key(seed), 3)
    widths = ((g.query_heads, g.key_dim), (g.kv_heads, g.key_dim), (g.kv_heads, g.value_dim))
    q, k, v = (
        mx.random.normal((1, heads, count, dim), key=key) for (heads, dim), key in zip(widths, keys, strict=True)
    )
    k = k * mx.where(mx.arange(g.key_dim) % 16 == 0, 4.0, 1.0)
    return Tokens(q.astype(dtype), k.astype(dtype), v.astype(dtype))


def pad(sequences: Sequence[Tokens], left: bool = False) -> Tokens:
    """Return a batch of sequences of different length as one, padded on the right or the left."""
    longest = max(s.count for s in sequences)

    def one(array: mx.array) -> mx.array:
        missing = longest - array.shape[2]
        # Padding of a size that would be noticed if anything read it.
        widths = [(0, 0), (0, 0), (missing, 0) if left else (0, missing), (0, 0)]
        return mx.pad(array, widths, constant_values=100.0)

    return Tokens(
        mx.concatenate([one(s.queries) for s in sequences]),
        mx.concatenate([one(s.keys) for s in sequences]),
        mx.concatenate([one(s.values) for s in sequences]),
    )


def new_cache(spec: str) -> CompressedKVCache:
    """Return an empty cache of a method for `GEOMETRY`."""
    parsed = Spec.parse(spec)
    policy, store = parsed.create(GEOMETRY)
    return CompressedKVCache(policy, store, {"model": "", "spec": str(parsed), "geometry": asdict(GEOMETRY)})


def new_store(spec: str) -> Store:
    """Return an empty store of a method for `GEOMETRY`, without its policy."""
    return Spec.parse(spec).create(GEOMETRY)[1]


def step(cache: CompressedKVCache, tokens: Tokens) -> mx.array:
    """Do what a model's attention does with a chunk of tokens: [batch, query_heads, chunk, value_dim]."""
    mask = cache.make_mask(tokens.count)
    keys, values = cache.update_and_fetch(tokens.keys, tokens.values)
    output = cache.attend(tokens.queries, keys, values, SCALE, mask)
    mx.eval(output)
    return output


def feed(cache: CompressedKVCache, tokens: Tokens, chunks: Iterable[int] | None = None) -> mx.array:
    """Feed tokens in chunks (default: all at once) and return all outputs."""
    outputs: list[mx.array] = []
    done = 0
    for n in [tokens.count] if chunks is None else chunks:
        outputs.append(step(cache, tokens[done : done + n]))
        done += n
    return mx.concatenate(outputs, axis=2)


def exact_attention(
    queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], scale: float = SCALE
) -> NDArray[np.float64]:
    """Return causal attention in float64, the chunk being the newest rows: [query_heads, chunk, value_dim].

    Args:
        queries: [query_heads, chunk, key_dim].
        keys: [kv_heads, rows, key_dim].
        values: [kv_heads, rows, value_dim].
        scale: what the scores are multiplied with.
    """
    queries, keys, values = (array.astype(np.float64) for array in (queries, keys, values))
    group = queries.shape[0] // keys.shape[0]
    chunk, rows = queries.shape[1], keys.shape[1]
    scores = scale * queries @ np.repeat(keys, group, axis=0).swapaxes(1, 2)
    visible = np.tril(np.ones((chunk, rows), np.bool_), rows - chunk)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ np.repeat(values, group, axis=0)


def to_numpy(array: mx.array) -> NDArray[np.float32]:
    """Return the first sequence of [batch, heads, rows, dim]."""
    return np.array(array[0].astype(mx.float32), np.float32)


def contents(store: Store) -> list[dict[str, bytes]]:
    """Return the bytes of every buffer's rows, sequence by sequence, without room for growth."""
    held: list[dict[str, bytes]] = []
    for b in range(len(store.lengths)):
        one: dict[str, bytes] = {}
        for name, buffer in store.buffers().items():
            if buffer.data is not None and buffer.lengths[b]:
                rows = mx.contiguous(buffer.data[0, :, buffer.begins[b] : buffer.ends[b]])
                one[name] = np.array(rows.view(mx.uint8), np.uint8).tobytes()
        held.append(one)
    return held


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Tell whether two arrays are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(mx.array_equal(mx.contiguous(a).view(mx.uint8), mx.contiguous(b).view(mx.uint8)).item())


def reachable(root: object) -> list[Any]:
    """Return every object that can be reached from `root`, classes, modules and functions' globals left out."""
    seen: dict[int, Any] = {}
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | types.CodeType):
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):  # its globals are the whole module
            stack += [*(item.__closure__ or ()), *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        else:
            stack += gc.get_referents(item)
            stack += getattr(item, "__dict__", {}).values()
    return list(seen.values())


def reachable_arrays(root: object) -> list[mx.array]:
    """Return every MLX array that can be reached from `root`."""
    return [item for item in reachable(root) if isinstance(item, mx.array)]
