"""Options that the benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.bench.result import writable
from strata.cli import options

Model = Annotated[
    str,
    typer.Option(
        help=f"A shape ({options.SHAPE_NAMES}) with random weights, a checkpoint folder, org/model of the Hugging "
        "Face cache, or builtin."
    ),
]
LoadFormat = Annotated[str | None, options.engine_option(help="auto or dummy; dummy for a shape if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")]
Save = Annotated[Path | None, typer.Option(help="Append the result to this JSON-lines file.", callback=writable)]
