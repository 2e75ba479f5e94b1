"""The options of RVQ with trained codebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_kv import Geometry

    from .store import RvqStore


@dataclass(frozen=True)
class TrainedRvq:
    """Quantise rows by codebooks of vectors that were fitted to a model's own rows (arXiv 2410.15704).

    A row is a standard deviation of two bytes and, for each stage and each group of 32 channels, a byte: the nearest of
    256 vectors to what the stages before leave. `mlx_kv fit` fits the codebooks from a text and saves them; a file that
    was fitted for another model is refused. The newest and the first rows stay in full precision, as with `rvq`.

    Raises:
        ValueError: if an option is out of its range.
    """

    kind: ClassVar[str] = "store"

    codebooks: str = ""
    """The file that `mlx_kv fit` wrote."""
    residual: int = 128
    """Newest rows held in full precision."""
    sinks: int = 4
    """First rows held in full precision for good."""
    rollback: int = 0
    """Newest tokens that `trim` can take back exactly; delays quantisation by as many rows."""
    defer: bool = False
    """Quantise a prompt only at its end: nothing reads quantised rows before; the peak is an uncompressed one's."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _expect(self.codebooks != "", "codebooks, a file of mlx_kv fit", "none")
        _expect(_is(str, self.codebooks), "codebooks, a file's name", self.codebooks)
        for name in ("residual", "sinks", "rollback"):
            value = getattr(self, name)
            fits = _is(int, value) and value >= 0
            _expect(fits, f"{name} of 0 or more", value)
        _expect(_is(bool, self.defer), "defer True or False", self.defer)

    def create(self, geometry: Geometry) -> RvqStore:
        """Make the store of one layer.

        Raises:
            ValueError: if the codebooks are missing, damaged, another model's, or have none for this layer.
        """
        from .codebook_file import load_codebooks
        from .store import RvqStore

        books = load_codebooks(self.codebooks)
        if geometry.model and books.model != geometry.model:
            raise ValueError(f"[trained_rvq] {self.codebooks} was fitted for another model")
        sides = books.layers.get(geometry.layer)
        dims = (geometry.key_dim, geometry.value_dim)
        if sides is None or tuple(side.dim for side in sides) != dims:
            raise ValueError(
                f"[trained_rvq] expected codebooks for layer {geometry.layer} with head dims {dims}, got none in "
                f"{self.codebooks}"
            )
        return RvqStore(self, sides)

    def check(self, key_dim: int, value_dim: int) -> None:
        """Any head dims that `create` has found codebooks for will do."""

    @staticmethod
    def fit(
        rows: Mapping[int, tuple[mx.array, mx.array]],
        model: str,
        file: str,
        seed: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Fit codebooks to a model's own rows and save them, for `mlx_kv fit`.

        Args:
            rows: for each layer, keys and values [1, kv_heads, rows, dim] of a text.
            model: the model's fingerprint.
            file: a name ending in .safetensors.
            seed: of the first guesses.
            on_progress: hears how many of all sides are done.

        Returns:
            Bytes of the codebooks.

        Raises:
            ValueError: if a head dim is no multiple of 32, or there are too few rows.
        """
        from .codebook_file import save_codebooks
        from .fit import fit_codebooks
        from .trained import TrainedCodec

        fitted: dict[int, tuple[TrainedCodec, TrainedCodec]] = {}
        for done, (layer, (keys, values)) in enumerate(rows.items()):
            sides = [
                TrainedCodec(fit_codebooks(side, strided, seed), side.shape[-1], strided)
                for side, strided in ((keys, True), (values, False))
            ]
            fitted[layer] = (sides[0], sides[1])
            on_progress(done + 1, len(rows))
        return save_codebooks(file, model, fitted)


def _is(kind: type, value: object) -> bool:
    return type(value) is kind


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[trained_rvq] expected {expected}, got {got}")
