"""KIVI's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from mlx_kv import Geometry

    from .store import KiviStore

BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Kivi:
    """Quantise keys per channel and values per token (KIVI, arXiv 2402.02750).

    The newest rows stay in full precision, and so do the first ones of the sequence, which models use as attention
    sinks (our addition: the paper's method is sinks=0). Rows of a chunk are attended to in full precision and quantised
    afterwards, so a prompt processed in chunks reads its earlier chunks already quantised, unless `defer` holds the
    whole prompt in full precision until it has ended.

    Raises:
        ValueError: if an option is out of its range.
    """

    kind: ClassVar[str] = "store"

    bits: int = 2
    """Bits of a code: 2, 3, 4 or 8."""
    key_bits: int | None = None
    """Bits of a key's code, if they differ from `bits`."""
    value_bits: int | None = None
    """Bits of a value's code, if they differ from `bits`."""
    group_size: int = 32
    """Numbers that share a scale and a minimum: 32, 64 or 128 tokens of a key channel, or channels of a value token."""
    residual: int = 128
    """Newest rows held in full precision: a multiple of group_size."""
    sinks: int = 4
    """First rows held in full precision for good; fewer than `residual`."""
    rollback: int = 0
    """Newest tokens that `trim` can take back exactly; delays quantisation by as many rows."""
    defer: bool = False
    """Quantise a prompt only at its end: nothing reads quantised rows before; the peak is an uncompressed one's."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, bits in (("bits", self.bits), ("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits is not None or name == "bits":
                _expect(_is_count(bits) and bits in BITS, f"{name} in {BITS}", bits)
        _expect(
            _is_count(self.group_size) and self.group_size in GROUP_SIZES,
            f"group_size in {GROUP_SIZES}",
            self.group_size,
        )
        fits = _is_count(self.residual) and self.residual > 0 and self.residual % self.group_size == 0
        _expect(fits, f"residual a positive multiple of group_size {self.group_size}", self.residual)
        _expect(
            _is_count(self.sinks) and self.sinks < self.residual,
            f"sinks from 0 to residual {self.residual} - 1",
            self.sinks,
        )
        _expect(_is_count(self.rollback), "rollback of 0 or more", self.rollback)
        _expect(_is_flag(self.defer), "defer True or False", self.defer)

    @property
    def bits_of_keys(self) -> int:
        """Bits of a key's code."""
        return self.bits if self.key_bits is None else self.key_bits

    @property
    def bits_of_values(self) -> int:
        """Bits of a value's code."""
        return self.bits if self.value_bits is None else self.value_bits

    def check(self, key_dim: int, value_dim: int) -> None:
        """Check that head dims can be quantised and packed.

        Raises:
            ValueError: if value_dim is not a multiple of group_size, or a row of codes does not fill 32-bit words.
        """
        _expect(value_dim % self.group_size == 0, f"head_dim divisible by group_size {self.group_size}", value_dim)
        for bits, dim in ((self.bits_of_keys, key_dim), (self.bits_of_values, value_dim)):
            _expect(bits * dim % 32 == 0, f"{bits} bits times head_dim to fill 32-bit words", f"head_dim {dim}")

    def create(self, geometry: Geometry) -> KiviStore:
        """Make the store of one layer. Raises ValueError if its head dims do not fit."""
        from .store import KiviStore  # here, so that reading the options does not pull in the store

        self.check(geometry.key_dim, geometry.value_dim)
        return KiviStore(self)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[kivi] expected {expected}, got {got}")
