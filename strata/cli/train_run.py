"""A training run from its config to the finished model, on this rank: `strata train` without its command line."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from rich.table import Table

from strata.comm.launch import World, join_world
from strata.hardware import specs
from strata.train.config import EvaluateConfig, TrainConfig
from strata.train.data.encode import Encoder
from strata.train.export import Finished, accuracy_table, export
from strata.train.finish import save_model
from strata.train.log.picture import plot_report
from strata.train.profile import StepProfiler
from strata.train.score import Score, questions, score
from strata.train.trainer import Report, Trainer


class Screen(Protocol):
    """Where a run shows what it does."""

    def say(self, line: object) -> None:
        """A line, or a table."""

    def progress(self, done: int, steps: int) -> AbstractContextManager[Report]:
        """Around the steps of a run of which `done` are done; receives the lines of the log."""


def run_on_this_rank(
    config: TrainConfig, screen_of: Callable[[], Screen], *, resume: bool, steps: range | None
) -> None:
    """Train, then evaluate and export on the first rank. steps: to profile."""
    with join_world(config.run.device, timeout_seconds=config.faults.collective_seconds) as world:
        screen = screen_of() if world.is_main else _Silent()
        finished = _train(config, world, screen, resume=resume or world.restarts > 0, steps=steps)
    if finished is None:
        return
    screen.say(f"Model: {finished.model}")
    if config.evaluate is None:
        return
    if finished.device.type == "cuda":
        gc.collect()  # graphs of a model are cycles
        torch.cuda.empty_cache()  # the trainer's memory, which the engine may now take
    scores = evaluate(finished.model, config.evaluate, finished.device)
    table = json.dumps(accuracy_table(scores), indent=2) + "\n"
    (Path(config.run.out) / "accuracy.json").write_text(table, encoding="utf-8")
    screen.say(_score_table(scores))
    if config.export is not None:
        target = Path(config.export.folder)
        export(finished, target, scores, asdict(config))
        screen.say(f"Exported to {target}")


def _train(config: TrainConfig, world: World, screen: Screen, *, resume: bool, steps: range | None) -> Finished | None:
    """All steps. On the first rank the finished run; what trained it is gone."""
    folder = Path(config.run.out)
    profiler = None
    if steps is not None:
        profiler = StepProfiler(folder / "profile", steps, world.device, rank=world.rank)
    run = Trainer(config, world, resume=resume, peak_flops=peak_flops(world.device), warn=screen.say, profiler=profiler)
    done = run.position.step
    if steps is not None and steps[-1] <= done:
        raise ValueError(f"the steps to profile, {steps[0]}-{steps[-1]}, are done: this run goes on from step {done}")
    if steps is not None and steps[0] > run.steps:
        raise ValueError(f"the steps to profile, {steps[0]}-{steps[-1]}, are none of the {run.steps} steps of this run")
    if run.is_over:
        why, longer = "no step is left", "--run.steps" if config.run.epochs is None else "--run.epochs"
        if run.is_stopped:
            why, longer = "early stopping has ended it", "--validation.patience"
        screen.say(f"{folder} is at step {done} already, {why}; train on with a larger {longer}")
    with screen.progress(done, run.steps) as report:
        position = run.train(report)
    if profiler is not None:
        _say_profile(profiler, screen)
    if not world.is_main:
        return None
    model = save_model(run)
    plot_report(folder)
    return Finished(model, folder / "log.jsonl", position, world.device)


def _say_profile(profiler: StepProfiler, screen: Screen) -> None:
    profiler.close()  # the run may have ended within the steps
    if profiler.table is None:  # on ranks that trace nothing
        return
    for line in (profiler.table.text(), *profiler.notes):
        screen.say(line)


def peak_flops(device: torch.device) -> float | None:
    """The maker's dense bfloat16 peak of a GPU, FLOP/s; None for a CPU or an unlisted GPU."""
    if device.type == "cpu":
        return None
    known = specs.recognize(torch.cuda.get_device_name(device))
    return None if known is None else known.ceiling("compute", "bfloat16", measured=False).value


def evaluate(folder: Path, config: EvaluateConfig, device: torch.device) -> list[Score]:
    """Held-out accuracy of the model in `folder` by exercise, see `replies`."""
    # Imported here: most runs evaluate nothing, and every rank would pay for it.
    from strata.bench.accuracy.tasks import replies
    from strata.engine.llm import LLM

    examples = questions(config.examples)
    llm = LLM(folder, device=str(device))
    return score(examples, replies(llm, Encoder.load(folder), examples, config.max_tokens))


def _score_table(scores: list[Score]) -> Table:
    table = Table("task", "right", "asked", "accuracy", title="Held-out accuracy")
    for one in scores:
        table.add_row(one.task, str(one.correct), str(one.total), f"{one.accuracy:.1%}")
    return table


class _Silent:
    """The screen of ranks that do not print."""

    def say(self, line: object) -> None:
        pass

    def progress(self, done: int, steps: int) -> AbstractContextManager[Report]:
        return nullcontext(lambda _: None)
