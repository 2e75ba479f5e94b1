"""Texts to measure on that every Python installation has: the topics of `pydoc_data`, or the user's own file."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from mlx_kv_cli.errors import UserError

TOPICS: dict[str, str] = topics


def read_text(source: str) -> str:
    """The text of a file, or of a pydoc topic such as "typesseq". Raises UserError when it is neither."""
    path = Path(source).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the text {source}: {error}") from error
    if source in TOPICS:
        return TOPICS[source]
    raise UserError(
        f"no file and no pydoc topic is called {source!r} (topics: {', '.join(sorted(TOPICS)[:4])}, ..., typesseq)"
    )


def documentation() -> list[str]:
    """The paragraphs of all pydoc topics, in the order of the topics' names."""
    return [f"{paragraph}\n\n" for name in sorted(TOPICS) for paragraph in TOPICS[name].split("\n\n")]
