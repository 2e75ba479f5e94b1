"""The attention kernels: a layout's own text between parts of this package's."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.source import BODY_MARKER, joined, read

PACKAGE = "mlx_kv_fused_attention"
SEQUENCE = (PACKAGE, "kernels/sequence.metal")
ROWS = (PACKAGE, "kernels/rows.metal")
FRAGMENTS = (PACKAGE, "kernels/fragments.metal")
TILES = (PACKAGE, "kernels/tiles.metal")
MERGE_ARRAYS = (PACKAGE, "kernels/merge_arrays.metal")
NO_NOISE = ((PACKAGE, "kernels/no_noise.metal"),)
ROW_NOISE = (("mlx_kv_kernels", "kernels/gumbel.metal"), (PACKAGE, "kernels/row_noise.metal"))
NOISE_INPUTS = ("positions", "steps", "seeds")
"""What `ROW_NOISE` reads."""


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """attend_rows or attend_tiles for one layout.

    The text is sequence.metal, the layout's, the noise's, this package's helpers and the kernel's own: helpers first,
    then bodies.
    """

    layout_sources: tuple[tuple[str, str], ...] = ()
    noise_sources: tuple[tuple[str, str], ...] = NO_NOISE

    @property
    def text(self) -> str:
        """The composed text; `#line` keeps every file's own name and lines in messages."""
        helpers = (ROWS, FRAGMENTS, TILES) if self.name == "attend_tiles" else (ROWS,)
        # An output that is not wanted is not made; the text then names another one, and never writes to it.
        wanted = "logits" if "logits" in self.output_names else "partial"
        logits = ("logits", f"{BODY_MARKER}\n    device float* all_logits = {wanted};\n")
        basis = read_files(SEQUENCE, *self.layout_sources, *self.noise_sources, *helpers)
        return joined((*basis, logits, *read_files(own(self))))


@dataclass(frozen=True)
class MergeKernel(Kernel):
    """merge_splits for one basis, whose files' text comes first: helpers, then bodies."""

    basis_sources: tuple[tuple[str, str], ...] = ((PACKAGE, "kernels/models_basis.metal"),)

    @property
    def text(self) -> str:
        """The composed text."""
        return joined(read_files(MERGE_ARRAYS, *self.basis_sources, own(self)))


def own(kernel: Kernel) -> tuple[str, str]:
    """Return the package and the path of a kernel's own file."""
    return kernel.package, f"kernels/{kernel.filename}"


def read_files(*files: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the name and the text of files, each a package and a path in it."""
    return tuple([(file[1].rpartition("/")[2], read(*file)) for file in files])
