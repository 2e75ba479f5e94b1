"""The only module that calls mlx_lm, whose functions are not fully typed; everything else sees the types below."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn  # pyright: ignore[reportMissingTypeStubs]
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Model = nn.Module
Cache = list[Any]  # one mlx-lm cache per layer
CacheFactory = Callable[[], Cache]


class Tokenizer(Protocol):
    """What is used of mlx_lm's tokenizer."""

    has_chat_template: bool
    bos_token: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        ...

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """The messages as one text (with tokenize=False) in the model's own format."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the names and defaults are mlx-lm's (temp 0 is greedy)."""

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


@dataclass(frozen=True)
class Piece:
    """One step of a generation, counted as mlx-lm counts; speeds in tokens per second."""

    text: str
    token: int
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    finish_reason: str | None


def load_weights(path: str) -> tuple[Model, Tokenizer]:
    """Load a folder or hub id without evaluating the weights yet."""
    model, tokenizer = cast("tuple[Model, Any]", load(path, lazy=True)[:2])
    return model, tokenizer


def float_dtype(model: Model) -> mx.Dtype:
    """The dtype of the first floating-point weight that is not packed."""
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return next(weight.dtype for _, weight in weights if mx.issubdtype(weight.dtype, mx.floating))


def materialise(model: Model, dtype: mx.Dtype | None) -> None:
    """Bring the weights into memory, the floating-point ones converted when a dtype is given."""
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())


def full_cache(model: Model) -> Cache:
    """Mlx-lm's own, uncompressed cache.

    Raises ValueError while the model's `make_cache` is replaced (mlx_kv.install).
    """
    if "make_cache" in vars(model):
        raise ValueError(
            "[mlx_kv_cli] model.make_cache is replaced; undo mlx_kv.install before comparing with the full cache"
        )
    return make_prompt_cache(model)


def quantized_cache(model: Model, bits: int, group_size: int) -> Cache:
    """Mlx-lm's own quantised cache, from the first token.

    Raises ValueError when a layer's cache cannot be quantised.
    """
    layers = full_cache(model)
    for number, layer in enumerate(layers):
        if type(layer) is not KVCache:
            raise ValueError(
                f"[mlx_lm] expected a plain KVCache to quantise at layer {number}, got {type(layer).__name__}"
            )
    return [QuantizedKVCache(group_size=group_size, bits=bits) for _ in layers]


def logits(model: Model, tokens: Int[mx.array, "1 tokens"], cache: Cache) -> Float[mx.array, "1 tokens vocabulary"]:
    """One forward pass through the cache."""
    return cast(mx.array, model(tokens, cache=cache))


def feed(model: Model, tokens: Int[mx.array, "1 tokens"], cache: Cache) -> None:
    """Fill the cache; the logits are never computed."""
    model(tokens, cache=cache)
    mx.eval([layer.state for layer in cache])


def stream(
    model: Model,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    cache: Cache,
    *,
    max_tokens: int,
    sampling: Sampling,
    prefill_step_size: int = 2048,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    """Generate through `cache`; `on_prefill(done, total)` hears of prompt tokens as they are processed."""
    responses = stream_generate(
        model,
        cast(Any, tokenizer),
        list(prompt),
        max_tokens=max_tokens,
        sampler=make_sampler(sampling.temp, sampling.top_p, sampling.min_p, top_k=sampling.top_k),
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
        prompt_progress_callback=on_prefill,
    )
    for r in responses:
        yield Piece(
            r.text, r.token, r.prompt_tokens, r.prompt_tps, r.generation_tokens, r.generation_tps, r.finish_reason
        )
