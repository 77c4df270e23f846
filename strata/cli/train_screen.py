"""What a training run shows of itself while it runs: a bar in a terminal, lines in a file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from strata.train.trainer import Report

# What a line of the log shows on the screen, where it has it.
SHOWN = {
    "loss": ".4f",
    "validation_loss": ".4f",
    "preferred": ".2f",
    "margin": ".3f",
    "validation_preferred": ".2f",
    "validation_margin": ".3f",
    "learning_rate": ".2e",
    "gradient_norm": ".2f",
    "tokens_per_second": ",",
    "mfu": ".1%",
}
# The time that is left follows from so many lines of the log: the first steps of a run are slow.
_LINES = 8


class Screen:
    """Progress of a run, for the one rank that prints."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)

    def say(self, line: object) -> None:
        self._console.print(line, soft_wrap=isinstance(line, str))

    @contextmanager
    def progress(self, done: int, steps: int) -> Iterator[Report]:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[values]}")
        lines_only, place = not self._console.is_terminal, Place(done, steps)
        with Progress(*columns, console=self._console, disable=lines_only) as bar:
            task = bar.add_task(f"step {done} of {steps}", total=steps, completed=done, values="starting")

            def show(line: dict[str, Any]) -> None:
                values = "  ".join(f"{name} {line[name]:{form}}" for name, form in SHOWN.items() if name in line)
                described = place.at(line["step"])
                bar.update(task, completed=line["step"], description=described, values=values)
                if lines_only:
                    self.say(f"{described}  {values}")

            yield show


class Place:
    """Where a run is, and how long the rest of it takes at the pace of its last lines."""

    def __init__(self, done: int, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._seen = deque([(clock(), done)], maxlen=_LINES)

    def at(self, step: int) -> str:
        """As "step 5 of 40, 12 s left"."""
        now, (began, first) = self._clock(), self._seen[0]
        self._seen.append((now, step))
        described = f"step {step} of {self._steps}"
        if step <= first or step >= self._steps:
            return described  # steps were taken back, or none is left
        return f"{described}, {duration((self._steps - step) * (now - began) / (step - first))} left"


def duration(seconds: float) -> str:
    """In words, as exactly as a guess is."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
