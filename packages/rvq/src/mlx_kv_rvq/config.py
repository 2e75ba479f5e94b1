"""RVQ's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .rotation import HEAD_DIMS

if TYPE_CHECKING:
    from mlx_kv import Geometry

    from .codec import RotatedCodec
    from .store import RvqStore

BITS = (1, 2, 3, 4)
STAGES = (1, 2, 3)
BLOCK = 128
"""Rows whose mean is removed from keys."""
TOGETHER = 32
"""Rows that are encoded together where they have no block: a launch for each would slow decoding down."""


@dataclass(frozen=True)
class Rvq:
    """Rotate each row of keys and values, then quantise its direction by codebooks made for it.

    A row is a norm of two bytes and `stages` times `bits` for each channel (randomised Hadamard rotation as in QuaRot,
    arXiv 2404.00456; scalar Lloyd-Max codebooks as in TurboQuant, arXiv 2504.19874; stages quantise what is left by
    those before). Nothing is learnt from data. The newest rows stay in full precision, and so do the first ones of the
    sequence, which models use as attention sinks.

    Raises:
        ValueError: if an option is out of its range.
    """

    kind: ClassVar[str] = "store"

    key_bits: int = 2
    """Bits of a key's code in each stage: 1 to 4."""
    value_bits: int = 2
    """Bits of a value's code in each stage: 1 to 4."""
    stages: int = 1
    """Codebooks that each code the residual of the one before: 1 to 3."""
    residual: int = 128
    """Newest rows held in full precision."""
    sinks: int = 4
    """First rows held in full precision for good; fewer than a block of 128."""
    seed: int = 0
    """Of the rotation's signs."""
    center: bool = True
    """Remove the mean of each block of 128 keys, and hold it in the model's dtype; keys then wait for whole blocks."""
    unbiased: bool | None = None
    """Scale rows so that inner products are right on average; False has a smaller squared error, but shrinks them.

    Default: True where keys are centred, since shrunk scores spread attention over more rows, and at 2 bits single
    facts get lost; False where they are not, since what is scaled up is the error of their large fixed part.
    """
    rollback: int = 0
    """Newest tokens that `trim` can take back exactly; delays quantisation by as many rows."""
    defer: bool = False
    """Quantise a prompt only at its end: nothing reads quantised rows before; the peak is an uncompressed one's."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            _expect(_is_count(bits) and bits in BITS, f"{name} from 1 to 4", bits)
        _expect(_is_count(self.stages) and self.stages in STAGES, "stages from 1 to 3", self.stages)
        _expect(_is_count(self.residual), "residual of 0 or more", self.residual)
        _expect(_is_count(self.sinks) and self.sinks < BLOCK, f"sinks from 0 to {BLOCK - 1}", self.sinks)
        _expect(_is_count(self.seed), "seed of 0 or more", self.seed)
        _expect(_is_count(self.rollback), "rollback of 0 or more", self.rollback)
        for name in ("center", "unbiased", "defer"):
            value = getattr(self, name)
            unset = name == "unbiased" and value is None
            _expect(unset or isinstance(value, bool), f"{name} True or False", value)

    @property
    def has_unbiased_norms(self) -> bool:
        """What `unbiased` comes to."""
        return self.center if self.unbiased is None else self.unbiased

    def check(self, key_dim: int, value_dim: int) -> None:
        """Check that there is a rotation for both head dims.

        Raises:
            ValueError: if there is none.
        """
        for dim in (key_dim, value_dim):
            _expect(dim in HEAD_DIMS, f"head_dim in {HEAD_DIMS}", dim)

    def codecs(self) -> tuple[RotatedCodec, RotatedCodec]:
        """Return how keys and values are encoded."""
        from .codec import RotatedCodec

        rest = (self.stages, self.seed, self.has_unbiased_norms)
        return RotatedCodec(self.key_bits, *rest, self.center), RotatedCodec(self.value_bits, *rest, False)

    def create(self, geometry: Geometry) -> RvqStore:
        """Make the store of one layer. Raises ValueError if its head dims do not fit."""
        from .store import RvqStore  # here, so that reading the options does not pull in the store

        self.check(geometry.key_dim, geometry.value_dim)
        return RvqStore(self)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[rvq] expected {expected}, got {got}")
