"""A benchmark's result: where it came from, how it stands to its floor, and how it is printed and kept."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

# What a command that fails begins its last message with.
ERROR = "strata: error: "
PAGE_ENDINGS = (".html", ".htm")
# Columns enough for any table.
_WIDE = 200
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class HostGap:
    """Seconds that the device waits between the end of a step and the beginning of the next."""

    median: float
    p99: float

    def text(self) -> str:
        return f"host gap {self.median * 1e6:.1f} us a step (p99 {self.p99 * 1e6:.1f})"


@dataclass(frozen=True)
class Result:
    """What a test has measured.

    value: the median of `all`. floor: in the same unit, None if it is not known. host_gap: None where no device
    runs apart from the host. verdict: what holds the test back, in a line; None if nobody told.
    """

    test: str
    model: str
    dtype: str
    value: float
    unit: str
    all: list[float]
    floor: float | None
    host_gap: HostGap | None
    device: str
    verdict: str | None = None

    @property
    def share(self) -> float | None:
        """How much of the floor's speed was reached, 1 being all of it."""
        if self.floor is None:
            return None
        return self.value / self.floor if self.unit == "tok/s" else self.floor / self.value

    def values(self) -> dict[str, Any]:
        """As a line of a results file has it, with what is needed to reproduce it."""
        return asdict(self) | provenance()

    def text(self) -> str:
        every = ", ".join(number(value) for value in self.all)
        said = f"{self.test} {self.model} {self.dtype}: {number(self.value)} {self.unit} (median of {every})"
        if self.share is not None and self.floor is not None:
            said += f"; floor {number(self.floor)} {self.unit}, {self.share:.0%} of its speed"
        if self.host_gap is not None:
            said += f"; {self.host_gap.text()}"
        said += f"; {self.device}"
        return said if self.verdict is None else f"{said}\n{self.verdict}"


def make_result(
    test: str,
    model: str,
    dtype: str,
    values: list[float],
    unit: str,
    device: str,
    floor: float | None = None,
    host_gap: HostGap | None = None,
) -> Result:
    """The result of several repetitions of a test."""
    value = statistics.median(values)
    return Result(test, model, short_dtype(dtype), value, unit, values, floor, host_gap, device)


def provenance() -> dict[str, str | None]:
    """What is needed to reproduce a figure of this process."""
    return {
        "commit": _commit(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "command": shlex.join(["strata", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def short_dtype(name: str) -> str:
    """A dtype as results files name it: "bf16" for "bfloat16"."""
    return DTYPE_NAMES.get(name, name)


def report(values: Mapping[str, Any], shown: RenderableType, *, as_json: bool, save: Path | None) -> None:
    """Print a result, as text or in tables, and append it as a line of JSON if `save` names a file."""
    line = json.dumps(values)
    if as_json:
        print(line, flush=True)
    elif isinstance(shown, str):
        typer.echo(shown)
    else:
        report_console().print(shown, "")
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def report_console() -> Console:
    """A terminal is as wide as it is; a file or a pipe takes tables whole."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def writable(file: Path | None) -> Path | None:
    """For an option that names a file to write: raises OSError before the work if that cannot be done. A file that was
    not there is not there afterwards either: the work may fail yet."""
    if file is not None:
        new = not os.path.lexists(file)
        file.open("a").close()
        if new:
            file.unlink()
    return file


def ending_in(file: Path | None, option: str, *endings: str) -> Path | None:
    """For an option that names a file of one kind. Raises ValueError for a name by which whoever opens it would take it
    for another."""
    if file is not None and not file.name.lower().endswith(endings):
        raise ValueError(f"{option} {file}: give a name that ends in {' or '.join(endings)}")
    return file


def number(value: float) -> str:
    """A figure with about three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _commit() -> str | None:
    """The commit that the package runs from, "-dirty" if files differ from it; None outside a repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
