"""The attention kernels: a layout's own text between parts of this package's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlx_kv_kernels import Kernel
from mlx_kv_kernels.source import BODY_MARKER, read, split

PACKAGE = "mlx_kv_fused_attention"
SEQUENCE = (PACKAGE, "kernels/sequence.metal")
ROWS = (PACKAGE, "kernels/rows.metal")
FRAGMENTS = (PACKAGE, "kernels/fragments.metal")
TILES = (PACKAGE, "kernels/tiles.metal")


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """attend_rows or attend_tiles for one layout.

    The text is sequence.metal, the layout's, this package's helpers and the kernel's own: helpers first, then bodies.
    """

    layout_sources: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The composed text; `#line` keeps every file's own name and lines in messages."""
        helpers = (ROWS, FRAGMENTS, TILES) if self.name == "attend_tiles" else (ROWS,)
        own = (self.package, f"kernels/{self.filename}")
        # An output that is not wanted is not made; the text then names another one, and never writes to it.
        logits = "logits" if "logits" in self.output_names else "partial"
        return _compose(
            tuple((file[1].rpartition("/")[2], read(*file)) for file in (SEQUENCE, *self.layout_sources)),
            tuple((file[1].rpartition("/")[2], read(*file)) for file in helpers),
            (self.filename, read(*own)),
            logits,
        )


@dataclass(frozen=True)
class MergeKernel(Kernel):
    """merge_splits for one basis, whose files' text comes first: helpers, then bodies."""

    basis_sources: tuple[tuple[str, str], ...] = ((PACKAGE, "kernels/models_basis.metal"),)

    @property
    def text(self) -> str:
        """The composed text."""
        own = (self.package, f"kernels/{self.filename}")
        files = tuple((file[1].rpartition("/")[2], read(*file)) for file in (*self.basis_sources, own))
        return _joined(files)


File = tuple[str, str]  # name and text


@cache
def _joined(files: tuple[File, ...]) -> str:
    parts = _split(files)
    helpers, bodies = "".join([helper for helper, _ in parts]), "".join([statements for _, statements in parts])
    return f"{helpers}{BODY_MARKER}\n{bodies}"


def _split(files: tuple[File, ...]) -> list[tuple[str, str]]:
    """Helpers and body of each file, of which some have no body."""
    return [split(text if BODY_MARKER in text else f"{text}{BODY_MARKER}\n", name) for name, text in files]


@cache
def _compose(before: tuple[File, ...], helpers: tuple[File, ...], own: File, logits: str) -> str:
    parts = _split(before)
    header, body = split(own[1], own[0])
    return "".join(
        [
            *(helper for helper, _ in parts),
            *(f'#line 1 "{name}"\n{text}' for name, text in helpers),
            header,
            BODY_MARKER + "\n",
            *(statements for _, statements in parts),
            f"    device float* all_logits = {logits};\n",
            body,
        ]
    )
