"""All places where the log of a run goes, behind one interface; only rank 0 writes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from strata.train.log.config import LogConfig
from strata.train.log.json_lines import JsonLines

FILE = "log.jsonl"


class Sink(Protocol):
    """A place that lines go to."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """values: numbers, text or lists of them."""

    def close(self) -> None:
        """Write what still waits."""


class TensorBoard:
    """Its event files, by its own writer: a scalar for each number of a line. A run that goes on hides what an earlier
    one wrote after its step."""

    def __init__(self, folder: Path, step: int) -> None:
        """step: how many steps are done."""
        # Imported only if asked for, as below: both packages take long, and neither is a dependency.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if step:
            # Readers drop everything from this step on that stands in earlier files.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run at https://wandb.ai for each run here, however often it is resumed. The package finds its key; it is not
    read here."""

    def __init__(self, folder: Path, config: LogConfig, run_config: Mapping[str, Any]) -> None:
        """run_config: what the run was started with, shown beside its curves."""
        import wandb

        known = folder / "wandb-id.txt"
        identity = known.read_text(encoding="utf-8").strip() if known.exists() else wandb.util.generate_id()
        self._run = wandb.init(
            project=config.wandb_project,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(run_config),
            mode="offline" if config.wandb_offline else "online",
        )
        known.write_text(identity + "\n", encoding="utf-8")
        # A resumed run repeats steps, which the package's own count of calls would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Logs:
    """Lines for several sinks; without any, as on ranks other than 0, nothing happens.

    A sink that fails (a full disk) costs lines, never the run: `warn` hears of its first failure.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], None]) -> None:
        self._sinks, self._warn = list(sinks), warn
        self._failed: set[int] = set()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, of the step that was just done."""
        self._each(lambda sink: sink.write(step, values))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, work: Callable[[Sink], None]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                work(sink)
            except Exception as error:  # of foreign code too, whose errors have no common type
                if number not in self._failed:
                    self._failed.add(number)
                    self._warn(f"the log is incomplete, training goes on: {type(sink).__name__}: {error}")


def open_logs(
    folder: Path,
    config: LogConfig,
    step: int,
    run_config: Mapping[str, Any],
    *,
    rank: int = 0,
    warn: Callable[[str], None] = warnings.warn,
) -> Logs:
    """The logs of the run in `folder`: `log.jsonl`, and what `config` asks for.

    step: how many steps are done; what an earlier run logged after them is dropped. run_config: what the run was
    started with, as JSON has it. rank: of the world; others than 0 write nothing. warn: is called with sinks that fail
    later. Raises ValueError, on every rank, if a package that the config asks for is not installed.
    """
    _require("tensorboard", config.tensorboard, "pip install 'strata-llm[log]'")
    _require("wandb", config.wandb, "pip install wandb")
    if rank:
        return Logs((), warn)
    sinks: list[Sink] = [JsonLines(folder / FILE, step)]
    if config.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", step))
    if config.wandb:
        sinks.append(WeightsAndBiases(folder, config, run_config))
    return Logs(sinks, warn)


def _require(package: str, wanted: bool, install: str) -> None:
    if wanted and find_spec(package) is None:
        raise ValueError(f"log.{package} = true needs the package {package}: {install}, or leave it out")
