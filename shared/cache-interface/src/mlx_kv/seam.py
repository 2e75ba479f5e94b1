"""The one place where mlx-lm is made to call us.

Most mlx-lm models call `mlx_lm.models.base.scaled_dot_product_attention`, bound by name in each model module. It is
replaced by a wrapper that lets caches of ours answer and passes every other call on untouched. Three more functions
are wrapped so that mlx-lm refuses what it would otherwise do silently to our caches, and trims what they can take back.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.models import base, cache

Observer = Callable[[mx.array, mx.array], None]
_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observing(observer: Observer) -> Generator[None]:
    """While the block runs, in this thread, tell `observer` the keys and values that other caches' attention reads."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class SeamCache(ABC):
    """A cache that answers scaled_dot_product_attention itself."""

    @abstractmethod
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Return the attention's output [batch, query_heads, chunk, value_dim]."""

    @property
    def rollback(self) -> int | None:
        """How many of the newest tokens `trim` can take back; None for any number."""
        return None


def connect() -> None:
    """Wrap mlx-lm's functions wherever a loaded module has bound them, modules loaded since the last call included."""
    generate = import_module("mlx_lm.generate")  # the package's attribute of that name is a function
    _wrap(base, "scaled_dot_product_attention", _attention)
    _wrap(generate, "maybe_quantize_kv_cache", _refuse_kv_bits)
    _wrap(cache, "trim_prompt_cache", _trim)
    # generate.py has its own binding of this one, and keeps it: speculative decoding trims within `rollback`, prefix
    # reuse does not.
    if not hasattr(cache.can_trim_prompt_cache, "mlx_kv_wraps"):
        cache.can_trim_prompt_cache = _any_number(cache.can_trim_prompt_cache)


def _wrap(home: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    present = getattr(home, name)
    original = getattr(present, "mlx_kv_wraps", present)
    wrapped = present if present is not original else wrapper(original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)


def _attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, SeamCache):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        if observer := _observer.get():
            observer(keys, values)
        return original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)

    return _mark(scaled_dot_product_attention, original)


def _refuse_kv_bits(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def maybe_quantize_kv_cache(
        prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: int | None
    ) -> None:
        if kv_bits is not None and any(isinstance(c, SeamCache) for c in prompt_cache):
            raise ValueError(
                "[mlx_kv] kv_bits cannot be used with a compressed cache: it would quantise the layers that were left "
                "out; choose the bits in the method's spec instead"
            )
        original(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)

    return _mark(maybe_quantize_kv_cache, original)


def _any_number(original: Callable[[list[Any]], bool]) -> Callable[[list[Any]], bool]:
    """Answer for prefix reuse, which trims by any number: a cache that can only take back a few must say no."""

    @wraps(original)
    def can_trim_prompt_cache(cache: list[Any]) -> bool:
        limited = any(isinstance(c, SeamCache) and c.rollback is not None for c in cache)
        return not limited and original(cache)

    return _mark(can_trim_prompt_cache, original)


def _trim(original: Callable[[list[Any], int], int]) -> Callable[[list[Any], int], int]:
    """Trim also by the few tokens that a cache can take back, of which the original would no longer know."""

    @wraps(original)
    def trim_prompt_cache(cache: list[Any], num_tokens: int) -> int:
        if not cache or not all(c.is_trimmable() for c in cache):
            return 0
        # Ours come first: they may refuse, and nothing has changed then.
        trimmed = [c.trim(num_tokens) for c in sorted(cache, key=lambda c: not isinstance(c, SeamCache))]
        return trimmed[0]

    return _mark(trim_prompt_cache, original)


def _mark(wrapped: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    wrapped.mlx_kv_wraps = original  # type: ignore[attr-defined]
    return wrapped
