"""A bar of what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


@contextmanager
def progress(console: Console, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Called with how many are done, of how many, the bar shows it; not before, as what cannot begin has none."""
    columns: list[Any] = [TextColumn(unit), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
    bar = Bar(*columns, console=console)
    task = bar.add_task("", total=None)

    def report(done: int, of: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=of)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
