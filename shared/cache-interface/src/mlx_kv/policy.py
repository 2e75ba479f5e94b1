"""Policies: which rows of a layer are kept."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    import mlx.core as mx
    from jaxtyping import Float, Float32

    from .rows import Span
    from .store import Geometry, Store


class Attended(NamedTuple):
    """A chunk of tokens whose attention has just been computed, as a policy sees it."""

    queries: Float[mx.array, "batch query_heads chunk key_dim"]
    """After RoPE."""
    spans: Sequence[Span]
    """The real tokens of the chunk in each sequence; the others are padding."""
    scale: float
    """What attention multiplies the scores with."""
    sinks: Float[mx.array, " query_heads"] | None
    """Logits that join the softmax without a value, if the model has them."""
    store: Store
    """The rows attended to, the chunk's own as the newest; the policy may drop some of them."""
    logits: Float32[mx.array, "batch query_heads 1 rows"] | None
    """A single token's scaled logits, -inf where a row is not visible, for a policy that asks with `needs_logits`.

    None for a longer chunk: a prompt's logits can be larger than the cache, and are to be computed tile by tile.
    """


class Policy(ABC):  # noqa: B024 (a policy without state overrides nothing)
    """Decides which rows of one layer are kept. The base keeps all of them.

    One policy object serves one layer of one generation; a batch shares it as it shares the store.
    """

    evicts: bool = False
    """Whether rows are ever dropped: such a cache is never trimmable, and refused where layers share their rows."""
    evicts_while_decoding: bool = False
    """Whether rows are dropped between prompts as well."""
    evicts_every_step: bool = False
    """Whether that is a row at every step: a store whose rows are compressed together cannot follow."""
    needs_logits: bool = False
    """Whether `observe` needs the logits of single-token calls."""

    def decode(
        self,
        queries: Float[mx.array, "1 query_heads 1 key_dim"],
        store: Store,
        scale: float,
        sinks: Float[mx.array, " query_heads"] | None,
    ) -> Float[mx.array, "1 query_heads 1 value_dim"] | None:
        """Answer the attention of a token of one sequence over all rows held, and take note of it, both at once.

        None, and nothing has changed, where attention is to come first and `observe` after it.
        """
        return None

    def observe(self, chunk: Attended) -> bool:
        """Take note of a chunk after its attention, and drop rows of its store that are no longer kept.

        Returns:
            Whether arrays of the policy or the store have changed: the cache ties them to attention's output, so that
            no step's graph outlives it.
        """
        return False

    def fresh(self) -> Self:
        """Return a policy of the same configuration that has seen nothing."""
        return type(self)()

    def blank(self, batch: int) -> Self:
        """Return a policy of the same configuration with `batch` sequences that have seen nothing."""
        return self.fresh()

    def select(self, sequences: Sequence[int]) -> Self:
        """Return a policy with the state of these sequences, in this order."""
        return self.fresh()

    def extend(self, other: Any) -> None:  # noqa: B027 (nothing to add without state)
        """Append the state of the sequences of another policy of the same class and configuration."""

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        return {}

    def places(self) -> dict[str, Any]:
        """Everything else that `load` needs, as numbers and lists that JSON can hold."""
        return {}

    def load(self, arrays: Mapping[str, mx.array], places: Mapping[str, Any]) -> None:  # noqa: B027 (no state)
        """Take over `arrays` and `places` of a policy of the same configuration."""


class PromptEnd:
    """Tells when each sequence's prompt has ended: at the first single token after a chunk of several.

    mlx-lm feeds the last token of a prompt alone. A chunk of one token at a prompt's tail counts as the end one token
    early.
    """

    def __init__(self, armed: Sequence[bool] = ()) -> None:
        """Start with `armed`: whether each sequence's newest tokens are a prompt's."""
        self.armed = list(armed)

    def advance(self, spans: Sequence[Span]) -> list[bool]:
        """Take note of the next chunk and return which sequences' prompts have ended with it."""
        counts = [last - first for first, last in spans]
        armed = self.armed or [False] * len(counts)
        self.armed = [n > 1 or (n == 0 and before) for n, before in zip(counts, armed, strict=True)]
        return [n == 1 and before for n, before in zip(counts, armed, strict=True)]


class KeepAllPolicy(Policy):
    """Keeps every row: compression is the store's alone."""


@dataclass(frozen=True)
class KeepAll:
    """Keep every row."""

    kind: ClassVar[str] = "policy"

    def create(self, geometry: Geometry) -> KeepAllPolicy:
        """Make the policy of one layer; any geometry will do."""
        return KeepAllPolicy()
