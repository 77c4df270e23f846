"""An explanation as tables, JSON, a page or a trace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.bench.result import PAGE_ENDINGS, ending_in, writable
from strata.plan.explain.explanation import Explanation, OperationTime

if TYPE_CHECKING:
    from rich.table import Table


def page_file(file: Path | None) -> Path | None:
    """See `writable`. Raises ValueError for a name that is no page's."""
    return writable(ending_in(file, "--html", *PAGE_ENDINGS))


def trace_name(file: Path | None) -> Path | None:
    """See `writable`. Raises ValueError for a name by which Perfetto, or who reads it, would not know what it is."""
    return writable(ending_in(file, "--trace", ".json", ".json.gz"))


Html = Annotated[Path | None, typer.Option(help="Also write one self-contained page (.html).", callback=page_file)]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write a trace for Perfetto (.json or .json.gz).", callback=trace_name),
]


def show(found: Explanation, *, as_json: bool, html: Path | None, trace: Path | None) -> None:
    """Tables or one JSON object on standard output, and the files that are asked for."""
    from strata.plan.report.page import html_page
    from strata.plan.report.trace import chrome_trace, write_trace

    if html is not None:
        html.write_text(html_page(found), encoding="utf-8")
    if trace is not None:
        write_trace(trace, chrome_trace(found))
    if as_json:
        print(json.dumps(values(found)))
    else:
        draw(found)


def values(found: Explanation) -> dict[str, Any]:
    """As JSON has it, with what follows from the parts. A floor that is not known is null."""
    fall = found.waterfall
    given = dataclasses.asdict(found)
    known = {"floor": fall.floor, "share_of_floor": fall.floor / fall.measured} if fall.floor else {}
    given["waterfall"] |= {"unexplained": fall.unexplained, "floor": None, "share_of_floor": None} | known
    given["verdict"]["line"] = found.verdict.line
    return given


def draw(found: Explanation) -> None:
    """The waterfall, the operations beside their floors, and the verdict, as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from strata.cost.draw import duration
    from strata.plan.report.page import ROUNDING

    # Ids of requests and paths of models are a user's: brackets in them are no markup.
    console, fall = Console(highlight=False, markup=False, emoji=False), found.waterfall
    title = found.title if found.device is None else f"{found.title}; {found.device}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("layer", "cause"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("measured", "", "", duration(fall.measured), "")
    for part in fall.parts:
        table.add_row(part.name, part.layer, part.cause, duration(part.seconds), f"{part.seconds / fall.measured:.1%}")
    missing = fall.unexplained if abs(fall.unexplained) > ROUNDING * fall.measured else 0.0
    table.add_row("not explained", "", "", duration(missing), f"{missing / fall.measured:.1%}")
    if fall.floor:
        table.add_row("floor", "", "", duration(fall.floor), f"{fall.floor / fall.measured:.1%}")
    else:
        table.add_row("floor", "", "", "not known", "")
    console.print(table)
    if found.operations:
        console.print(_operations(found.operations))
    verdict = found.verdict
    console.print(f"{verdict.layer}: {verdict.symptom} ({verdict.cause})", style="bold", soft_wrap=True)
    for line in verdict.evidence:
        console.print(f"  {line}", soft_wrap=True)
    for remedy in verdict.remedies:
        option = f" ({remedy.option})" if remedy.option else ""
        console.print(f"  saves {remedy.gain:.0%}: {remedy.what}{option}", soft_wrap=True)
    for source in found.sources:
        console.print(f"from {source}", style="dim", soft_wrap=True)


def _operations(found: Sequence[OperationTime]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from strata.cost.draw import duration, quantity

    table = Table(title="operations", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("time", "floor", "FLOPs", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for one in found:
        amounts = quantity(one.flops), f"{quantity(one.bytes)}B"
        table.add_row(one.name, duration(one.seconds), duration(one.floor), *amounts, one.bound)
    return table
