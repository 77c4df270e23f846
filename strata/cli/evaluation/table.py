"""An evaluation as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from strata.bench.accuracy.evaluation import Evaluation
from strata.bench.accuracy.intervals import IntervalEstimate, wilson
from strata.bench.result import report_console
from strata.text.counted import counted


def show(found: Evaluation, model: str, against: str | None, text: str) -> None:
    """Print it. text: in words."""
    console = report_console()
    passages = counted(found.passages, "passage")
    if found.passages < found.passages_of_text:
        passages += f" of {found.passages_of_text:,}"
    console.print(f"{text}: {passages}, {counted(found.tokens, 'token')} scored", markup=False)
    console.print(_text_table(found, model, against))
    if found.scores:
        console.print(_task_table(found, against))
    units = counted(found.documents, "document") if found.documents > 1 else "one document, so there are none"
    console.print(f"Intervals of 95 %: of text by a bootstrap over {units}", style="dim")
    if found.scores:
        console.print("of tasks and their mean Wilson's, of the difference Bonett's and Price's of pairs", style="dim")


def _text_table(found: Evaluation, model: str, against: str | None) -> Table:
    table = Table(
        title=escape(model + (f" against {against}" if against else "")), title_justify="left", box=SIMPLE_HEAD
    )
    for name, justify in (("", "left"), ("", "right"), ("95 %", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    rows: tuple[tuple[str, IntervalEstimate | None, Callable[[float], str]], ...] = (
        ("KL, mean (nats)", found.kl_mean, _small),
        ("KL, 99th percentile", found.kl_p99, _small),
        ("top-1 agreement", found.top1_agreement, _percent),
        ("perplexity", found.perplexity, _plain),
        ("perplexity of the other", found.reference_perplexity, _plain),
        ("ratio of perplexities", found.perplexity_ratio, _plain),
    )
    for name, value, form in rows:
        if value is not None:
            table.add_row(name, form(value.value), _interval(value, form))
    return table


def _task_table(found: Evaluation, against: str | None) -> Table:
    table = Table(title="Tasks", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for name in ("asked", "right", "95 %", *("other", "95 %") * (against is not None)):
        table.add_column(name, justify="right", no_wrap=True)
    others = found.reference_scores or (None,) * len(found.scores)
    for one, other in zip(found.scores, others, strict=True):
        cells = []
        for each in (one, other):
            if each is not None:
                share = wilson(each.accuracy, each.total)
                cells += [_percent(share.value), _interval(share, _percent)]
        table.add_row(one.task, str(one.total), *cells)
    table.add_section()
    cells = []
    for mean in (found.task_mean, found.reference_task_mean):
        if mean is not None:
            cells += [_percent(mean.value), _interval(mean, _percent)]
    table.add_row("mean of tasks", "", *cells)
    if (difference := found.task_difference) is not None:
        table.add_row("difference", "", _percent(difference.value), _interval(difference, _percent))
    return table


def _interval(found: IntervalEstimate, form: Callable[[float], str]) -> str:
    return "" if found.low is None or found.high is None else f"{form(found.low)} to {form(found.high)}"


def _small(value: float) -> str:
    return f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _plain(value: float) -> str:
    return f"{value:.7g}"
