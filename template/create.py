"""Start a method's package from the template: `python template/create.py streaming` makes packages/streaming."""

import argparse
import re
import shutil
from pathlib import Path

TEMPLATE = Path(__file__).parent / "package"


def create(name: str, folder: Path) -> Path:
    """Copy the template to `folder`/`name`, named so throughout, and return the new package.

    Raises:
        ValueError: if the name is not lower-case words with hyphens between them.
        FileExistsError: if the package is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"[template] expected a name such as streaming or two-words, got {name!r}")
    words = name.split("-")
    names = {
        "mlx-kv-example": f"mlx-kv-{name}",
        "example": "_".join(words),
        "Example": "".join(word.capitalize() for word in words),
    }
    package = folder / name
    shutil.copytree(TEMPLATE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(package.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_file():
            path.write_text(_renamed(path.read_text(), names))
        path.rename(path.with_name(_renamed(path.name, names)))
    return package


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub("|".join(names), lambda found: names[found[0]], text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="lower-case words with hyphens between them")
    print(create(parser.parse_args().name, TEMPLATE.parents[1] / "packages"))
