"""A run of a few steps, measured now: what a config would take, told as a run's folder is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strata.comm.launch import join_world
from strata.plan.training_explain.recorded_run import RecordedRun, read_run
from strata.train.config import LearningRateSchedule, TrainConfig
from strata.train.log.config import LogConfig
from strata.train.profile import StepProfiler
from strata.train.trainer import Trainer

# Steps between two lines of the log, for which the host waits for the device: the first ones, until a run is recorded
# and warm, then those that count. Those that are traced follow.
_EACH, _TRACED = 6, 3


def short_run(config: TrainConfig, folder: Path) -> RecordedRun:
    """Train for a few steps into `folder`, on this process alone, and read what it left.

    Nothing of the run's own folder is touched. Raises ValueError for what does not go together, and for a layout of
    several ranks: those have a folder to explain.
    """
    if config.parallel is not None and config.parallel.ranks > 1:
        raise ValueError(
            f"[parallel] has {config.parallel.ranks} ranks and this is one process: train some steps with --ranks "
            f"{config.parallel.ranks} --profile 10-12, and explain the folder"
        )
    steps = 2 * _EACH + _TRACED
    name = Path(config.run.out).name
    short = replace(
        config,
        run=replace(
            config.run, out=str(folder / name), steps=steps, epochs=None, log_every=_EACH, checkpoint_every=steps
        ),
        schedule=LearningRateSchedule(0, 0),
        validation=None,
        log=LogConfig(),
        evaluate=None,
        export=None,
    )
    with join_world(short.run.device) as world:
        traced = range(steps - _TRACED + 1, steps + 1)
        profiler = StepProfiler(folder / name / "profile", traced, world.device)
        trainer = Trainer(short, world, profiler=profiler)
        trainer.train()
        profiler.close()
    run = read_run(folder / name)
    # The profiler takes its time of the traced steps; those before recur.
    return replace(run, what=replace(run.what, config=config), intervals=run.intervals[1:2])
