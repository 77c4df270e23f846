"""Options that the benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from strata.bench.result import report, writable
from strata.bench.run import Setup
from strata.cli import options
from strata.cli.groups import OptionGroup

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of text.")]
Repeat = Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")]


class SetupOptions(options.EngineOptions):
    """Of the engine that a test runs on."""

    model: Annotated[
        str,
        typer.Option(
            help=f"A shape ({options.SHAPE_NAMES}) with random weights, a checkpoint folder, org/model of the Hugging "
            "Face cache, or builtin."
        ),
    ] = "0.6B"
    load_format: Annotated[str | None, options.engine_option(help="auto or dummy; dummy for a shape if left out.")] = (
        None
    )
    dtype = "bfloat16"


def setup_options(names: str, **defaults: Any) -> OptionGroup:
    """A `Setup` by these options; defaults: where they are not those of all tests."""
    return OptionGroup(SetupOptions, names, Setup, defaults)


@dataclass(frozen=True)
class ReportOptions:
    """Where results go."""

    as_json: AsJson = False
    save: Annotated[Path | None, typer.Option(help="Append the result to this JSON-lines file.", callback=writable)] = (
        None
    )

    def report(self, values: Mapping[str, Any], shown: RenderableType) -> None:
        """See `strata.bench.result.report`."""
        report(values, shown, as_json=self.as_json, save=self.save)


Report = Annotated[ReportOptions, OptionGroup(ReportOptions, make=ReportOptions)]
