"""A benchmark's result: where it came from, how it stands to its floor, and how it is printed and kept."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Result:
    """One line of a results file. value: the median of `all`; floor: in the same unit, None if it is not known."""

    test: str
    model: str
    dtype: str
    value: float
    unit: str
    all: list[float]
    floor: float | None
    device: str
    commit: str | None
    torch: str | None
    triton: str | None
    command: str
    date: str

    @property
    def share(self) -> float | None:
        """How much of the floor's speed was reached, 1 being all of it."""
        if self.floor is None:
            return None
        return self.value / self.floor if self.unit == "tok/s" else self.floor / self.value


def make_result(
    test: str, model: str, dtype: str, values: list[float], unit: str, floor: float | None, device: str
) -> Result:
    """A result of this process, with what is needed to reproduce it."""
    return Result(
        test=test,
        model=model,
        dtype=DTYPE_NAMES.get(dtype, dtype),
        value=statistics.median(values),
        unit=unit,
        all=values,
        floor=floor,
        device=device,
        commit=_commit(),
        torch=_version("torch"),
        triton=_version("triton"),
        command=shlex.join(["strata", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def report(result: Result, *, as_json: bool, save: Path | None) -> None:
    """Print a result and, if `save` names a file, append it there as a line of JSON."""
    line = json.dumps(asdict(result))
    if as_json:
        print(line)
    else:
        typer.echo(_sentence(result))
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def cpu_name() -> str:
    """The processor of this machine as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _sentence(result: Result) -> str:
    every = ", ".join(_number(value) for value in result.all)
    said = f"{result.test} {result.model} {result.dtype}: {_number(result.value)} {result.unit} (median of {every})"
    if result.share is not None and result.floor is not None:
        said += f"; floor {_number(result.floor)} {result.unit}, {result.share:.0%} of its speed"
    return f"{said}; {result.device}"


def _number(value: float) -> str:
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
