"""`strata train`: trains a model as a TOML file says, on one device or on many."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from strata.cli import options
from strata.cli.ending import INTERRUPTED, explanation
from strata.engine.startup.clock import collector_off
from strata.train.launch import ended_at_once, launch

if TYPE_CHECKING:
    from strata.train.config import TrainConfig
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

_TOLD_TO_END = (INTERRUPTED, 128 + signal.SIGTERM)

command = typer.Typer(add_completion=False, rich_markup_mode="rich")
# The time that is left follows from so many lines of the log: the first steps of a run are slow.
_LINES = 8


@command.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file; examples/ has several.")],
    resume: Annotated[bool, typer.Option(help="Continue from the newest checkpoint in run.out.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, a GPU each; or start torchrun.")] = 1,
    restarts: Annotated[int, typer.Option(min=0, help="How often all ranks start again when one fails.")] = 0,
    profile: Annotated[str | None, typer.Option(help="Steps to trace, such as 10-12, into run.out/profile.")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print a step's memory and times on --hardware, and end.")
    ] = False,
    hardware: options.Hardware = "h200",
) -> None:
    """Train a model on what `strata data` has written: pretraining, SFT, LoRA or DPO, as the file's tables say.

    Every value of the file can be replaced: --SECTION.KEY VALUE, such as --run.steps 100 --optimizer.name muon.

    Loss, learning rate, tokens/s and MFU go to the screen and to log.jsonl in run.out; the model goes to run.out/model.

    Example: strata train examples/sft.toml
    """
    if (name := str(config)).startswith("--"):
        raise ValueError(f"{name} stands before the file; write strata train FILE --SECTION.KEY VALUE")
    with collector_off():
        from strata.train.config import read_train_config

    if estimate and context.args and not context.args[0].startswith("-"):
        raise ValueError(f"--estimate takes no name now: give --estimate --hardware {context.args[0]}")
    run = read_train_config(config, _changes(context.args))
    if estimate:
        from strata.cli.train_estimate import estimate_text

        typer.echo(estimate_text(run, hardware, ranks))
        return
    if options.is_passed(context, "hardware"):
        raise ValueError("--hardware is what --estimate looks at: add that, or leave this out")
    steps = None if profile is None else _steps(profile, run.run.steps)
    is_rank, code = "RANK" in os.environ, 0
    if not is_rank:
        _check_gpu(config, run)
    try:
        if ranks > 1 and not is_rank:
            code = _launch(run, ranks, restarts, resume=resume)
        else:
            _train(run, steps, resume=resume)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        gc.freeze()  # or the end of the process searches all that was imported for garbage, for seconds
    if code in _TOLD_TO_END and not is_rank:
        _say_how_to_go_on(run)
    raise typer.Exit(code)


def _train(run: TrainConfig, steps: range | None, *, resume: bool) -> None:
    """On this rank."""
    with collector_off():
        from strata.cli.train_run import run_on_this_rank

    gc.freeze()  # what was imported is no garbage: the collections between steps need not search it
    with ended_at_once(explanation):
        run_on_this_rank(run, TerminalScreen, resume=resume, steps=steps)


def _check_gpu(file: Path, run: TrainConfig) -> None:
    from strata.bench.needs_gpu import is_left_to_processor, require_gpu

    if is_left_to_processor(run.run.device):
        from strata.cli.train_estimate import model_config

        require_gpu(str(file), model_config(run), run.run.device, "--run.device cpu")


def _launch(run: TrainConfig, ranks: int, restarts: int, *, resume: bool) -> int:
    """The exit code of the ranks."""
    from strata.train.start import check_run

    check_run(run, ranks, resume=resume)
    return launch([sys.executable, "-m", "strata", *sys.argv[1:]], ranks, restarts)


def _say_how_to_go_on(run: TrainConfig) -> None:
    from strata.train.checkpoints.folder import checkpoints, step_of

    last = checkpoints(Path(run.run.out) / "checkpoints")[-1:]
    then = f"--resume goes on from step {step_of(last[0])}" if last else "no checkpoint was written yet"
    typer.echo(f"strata: interrupted; {then}", err=True)


def _changes(arguments: list[str]) -> list[tuple[str, str]]:
    """--run.steps 100 --run.out=runs/x as [("run.steps", "100"), ("run.out", "runs/x")]."""
    changes, left = [], list(arguments)
    while left:
        name, given, value = left.pop(0).partition("=")
        if not name.startswith("--") or "." not in name:
            raise ValueError(f"{name!r} is unknown; a value of the file is replaced by --SECTION.KEY VALUE")
        if not given and not left:
            raise ValueError(f"{name} has no value; write {name} VALUE")
        changes.append((name[2:].replace("-", "_"), value if given else left.pop(0)))
    return changes


def _steps(text: str, most: int | None) -> range:
    first, _, last = text.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()):
        raise ValueError(f"--profile {text} must be a step or a first and a last one, such as 10-12")
    steps = range(int(first), int(last or first) + 1)
    if not steps or (most is not None and steps[0] > most):
        raise ValueError(f"--profile {text} has none of the steps of this run{f', 1-{most}' if most else ''}")
    return steps


class TerminalScreen:
    """Progress of a run, for the one rank that prints."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)

    def say(self, line: object) -> None:
        self._console.print(line, soft_wrap=isinstance(line, str))

    @contextmanager
    def progress(self, done: int, steps: int) -> Iterator[Report]:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[values]}")
        lines_only, place = not self._console.is_terminal, Pace(done, steps)
        with Progress(*columns, console=self._console, disable=lines_only) as bar:
            task = bar.add_task(f"step {done} of {steps}", total=steps, completed=done, values="starting")

            def show(line: dict[str, Any]) -> None:
                values = "  ".join(f"{name} {line[name]:{form}}" for name, form in SHOWN.items() if name in line)
                described = place.at(line["step"])
                bar.update(task, completed=line["step"], description=described, values=values)
                if lines_only:
                    self.say(f"{described}  {values}")

            yield show


class Pace:
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
