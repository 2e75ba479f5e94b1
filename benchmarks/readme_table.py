"""Makes the README's table of methods from the JSON files of runs; a figure without a file is shown as missing.

    uv run python benchmarks/readme_table.py            # writes the table into README.md

Read are the files in the `benchmarks` folders of the tree, whatever their names, that these commands write:

    mlx_kv perplexity --json            bytes held, perplexity
    mlx_kv evaluate passkey --json, benchmarks/passkey.py      passkeys found
    benchmarks/decode_model.py          decode
    mlx_kv selftest --json              where kernels ran
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by benchmarks/readme_table.py -->", "<!-- end of what is made -->"
MISSING = "-"
DECODE_ROWS = (8192, 32768, 131072)


@dataclass(frozen=True)
class Row:
    """A line of the table: a spec, and the packages whose kernels it runs on."""

    spec: str
    packages: tuple[str, ...]


KERNELS, FUSED = "mlx-kv-kernels", "mlx-kv-fused-attention"
ROWS = [
    Row("kivi(bits=2)", ("mlx-kv-kivi",)),
    Row("kivi(bits=2, group_size=64)", ("mlx-kv-kivi", FUSED)),
    Row("rvq", ("mlx-kv-rvq",)),
    Row("h2o(heavy=128, recent=128)", (KERNELS,)),
    Row("keyformer(budget=256)", (KERNELS,)),
    Row("snapkv(budget=256, window=8)", (KERNELS,)),
    Row("pyramidkv(budget=256)", (KERNELS,)),
    Row("dense", (FUSED,)),
    Row("snapkv(budget=256, window=8)+kivi(bits=4)", (KERNELS, "mlx-kv-kivi")),
    Row("pyramidkv(budget=256)+rvq", (KERNELS, "mlx-kv-rvq")),
    Row("h2o(heavy=128, recent=128)+rvq(center=False)", (KERNELS, "mlx-kv-rvq")),
]
COLUMNS = (
    "method",
    "bytes per token",
    "fp16 / held",
    "perplexity",
    "passkey",
    *(f"decode {n >> 10}k" for n in DECODE_ROWS),
    "kernels ran on",
)


def same(spec: str) -> str:
    """Return a spec without its spaces: files write it in either way."""
    return spec.replace(" ", "")


def perplexities(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield figures of a file of `mlx_kv perplexity`."""
    for result in file["results"]:
        yield (
            same(result["method"]),
            {
                "bytes per token": f"{result['bytes_held'] / (file['tokens'] - 1):,.0f}",  # the last is predicted alone
                "fp16 / held": f"{result['fp16_bytes'] / result['bytes_held']:.1f}",
                "perplexity": f"{result['ratio']:.3f}",
            },
        )


def evaluations(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield figures of a file of `mlx_kv evaluate`: passkeys over all fillers."""
    for method in {result["method"] for result in file["results"]}:
        of_method = [result for result in file["results"] if result["method"] == method]
        found, trials = (sum(result[key] for result in of_method) for key in ("successes", "trials"))
        yield same(method), {"passkey": f"{found} of {trials}"}


def decodes(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield figures of a file of benchmarks/decode_model.py: tokens a second against the fp16 cache's."""
    specs = {file["spec"]: {case["rows"]: case["speed_against_fp16"] for case in file["cases"]}}
    for spec, of_rows in file.get("others", {}).items():
        specs[spec] = {int(rows): case["speed_against_fp16"] for rows, case in of_rows.items()}
    for spec, speeds in specs.items():
        yield same(spec), {f"decode {n >> 10}k": f"{speeds[n]:.2f}" for n in DECODE_ROWS if n in speeds}


def selftests(file: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield, for each package, the GPU that passed every case of it; the emulator in a file of a run without one."""
    where = file["machine"]["device"]["device_name"] if file["ran_on_gpu"] else "emulator"
    for package in {result["package"] for result in file["results"]}:
        of_package = [r for r in file["results"] if r["package"] == package]
        statuses = {r["status"] for r in of_package if file["ran_on_gpu"] == (r["backend"] != "emulator")}
        if "passed" in statuses and "failed" not in statuses:
            yield package, {"kernels ran on": where}


Reader = Callable[[dict[str, Any]], Iterator[tuple[str, dict[str, str]]]]
READERS: dict[str, Reader] = {
    "full": perplexities,
    "seeds": evaluations,
    "after_snapkv": decodes,
    "ran_on_gpu": selftests,
}
"""By a key that only this kind of file has."""


def figures(root: Path) -> dict[tuple[str, str], str]:
    """Return the figures of the table's rows, linked to their files, by spec (or package) and column.

    Raises:
        ValueError: if two files of this tree give different figures for one place.
    """
    shown = {same(row.spec) for row in ROWS} | {package for row in ROWS for package in row.packages}
    found: dict[tuple[str, str], str] = {}
    for path in sorted(root.glob("[!.]*/**/benchmarks/**/*.json")) + sorted(root.glob("benchmarks/**/*.json")):
        file = json.loads(path.read_text())
        readers = [reader for key, reader in READERS.items() if isinstance(file, dict) and key in file]
        for spec, columns in (pair for reader in readers[:1] for pair in reader(file)):
            for column, text in columns.items() if spec in shown else ():
                name, before = path.relative_to(root).as_posix(), found.get((spec, column), "")
                if before and column != "kernels ran on":
                    if f"[{text}]" not in before:
                        raise ValueError(f"[readme_table] {column} of {spec}: {before}, and {text} in {name}")
                    continue
                found[spec, column] = f"{before}, [{text}]({name})" if before else f"[{text}]({name})"
    return found


def table(root: Path) -> str:
    """Return the table in Markdown."""
    found = figures(root)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for row in ROWS:
        kernels = [found.get((package, COLUMNS[-1]), MISSING) for package in row.packages]
        cells = [found.get((same(row.spec), column), MISSING) for column in COLUMNS[1:-1]]
        lines.append("| " + " | ".join([f"`{row.spec}`", *cells, "; ".join(kernels)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Put the table between the two comments of the README."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{table(ROOT)}\n{END}{after}")


if __name__ == "__main__":
    main()
