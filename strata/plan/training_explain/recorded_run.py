"""What a run's folder tells of its time: the intervals of its log, and the steps that it traced."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from strata.train.log.description import RunDescription, read_description
from strata.train.log.json_lines import read_lines
from strata.train.log.logs import FILE
from strata.train.log.step_times import PROFILE, TIMES, VALIDATION
from strata.train.predict.flops import StepFlops
from strata.train.predict.step_kinds import StepKindTable, kind_of, read_step_trace
from strata.train.profile import STEP

# Of kernels that multiply in float32: cuBLAS's and CUTLASS's without tensor cores, with TF32, and cuBLAS's newer names.
_WIDE_PRODUCTS = ("sgemm", "tf32", "s1688", "nvjet_sss", "f32f32_f32")


@dataclass(frozen=True)
class Interval:
    """Between two lines of the log: see `StepTimes.take`; without what a profiler took. step: the last. flops: of all
    ranks."""

    step: int
    steps: int
    seconds: float
    device: float
    phases: Mapping[str, float]
    tokens: int
    sequences: int
    packs: int
    flops: StepFlops

    @property
    def each(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Trace:
    """Steps that were traced. wide: the share of the products' time that float32 kernels have."""

    table: StepKindTable
    wide: float


@dataclass(frozen=True)
class RecordedRun:
    """What a run left. slowest: the rank that computes longest most often, and the share of the time that the others
    lose to it; None of a single one. trace: None if no steps were traced."""

    folder: Path
    what: RunDescription
    intervals: tuple[Interval, ...]
    slowest: tuple[int, float] | None = None
    trace: Trace | None = None

    @cached_property
    def whole(self) -> Interval:
        """All intervals added up."""
        return _added(self.intervals)

    @property
    def filled(self) -> float:
        """The share of the packs' room that tokens fill."""
        return self.whole.tokens / max(1, self.whole.packs * self.what.config.data.tokens_per_pack)

    @property
    def warm_up(self) -> float:
        """What the first interval takes longer than as many of the usual steps; 0 where there is no other."""
        first, *others = self.intervals
        if not others:
            return 0.0
        return max(0.0, first.seconds - first.steps * median(one.each for one in others))

    @property
    def steady(self) -> Interval:
        """The run without its warm-up, added up: the intervals after the first stand for it, too."""
        counted = _added(self.intervals[1:] or self.intervals)
        scale = (self.whole.seconds - self.warm_up) / counted.seconds
        return replace(
            self.whole,
            seconds=counted.seconds * scale,
            device=counted.device * scale,
            phases={name: seconds * scale for name, seconds in counted.phases.items()},
        )


def _added(intervals: Sequence[Interval]) -> Interval:
    phases = Counter[str]()
    for one in intervals:
        phases.update(one.phases)
    names = ("steps", "seconds", "device", "tokens", "sequences", "packs")
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in intervals) for name in names}
    flops = sum((one.flops for one in intervals), StepFlops())
    return replace(intervals[-1], phases=phases, flops=flops, **sums)


def read_run(folder: Path) -> RecordedRun:
    """The run in a folder, finished or under way. Raises ValueError, naming the file, if there is none, or too little
    of one."""
    what = read_description(folder)
    path = folder / TIMES
    intervals = tuple(_interval(path, line) for line in _lines(path))
    intervals = tuple(one for one in intervals if one.steps and one.seconds > 0)
    if not intervals:
        raise ValueError(f"{path} tells of no step yet: wait for the first line of the log, or lower run.log_every")
    slowest = _slowest(_lines(folder / FILE))
    traced = folder / "profile" / "trace.json.gz"
    return RecordedRun(folder, what, intervals, slowest, _read_trace(traced) if traced.is_file() else None)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_lines(path) if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} is no log of a run: {error}") from None
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path} is no log of a run: a line is no JSON object")
    return lines


def _interval(path: Path, line: Mapping[str, Any]) -> Interval:
    try:
        phases = dict(line["phases"])
        return Interval(
            line["step"],
            line["steps"],
            line["seconds"] - sum(phases.pop(name, 0.0) for name in (PROFILE, VALIDATION)),
            line["device"],
            phases,
            line["tokens"],
            line["sequences"],
            line["packs"],
            StepFlops(line["products"], line["attention"], line["head"]),
        )
    except KeyError as error:
        raise ValueError(f"{path}: a line has no {error}; another version of Strata wrote it") from None


def _slowest(lines: Iterable[Mapping[str, Any]]) -> tuple[int, float] | None:
    told = [line for line in lines if "slowest_rank" in line]
    if not told:
        return None
    ranks = [line["slowest_rank"] for line in told]
    rank = max(sorted(set(ranks)), key=ranks.count)
    return rank, fmean(line["slowest_share"] * (line["slowest_rank"] == rank) for line in told)


def _read_trace(path: Path) -> Trace:
    try:
        with gzip.open(path) as stream:
            events = json.load(stream)["traceEvents"]
        table = read_step_trace(events, STEP, {})
    except (ValueError, KeyError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not the trace of a run's steps: {error}; remove it, or profile again") from None
    return Trace(table, wide_share(events))


def wide_share(events: Iterable[Mapping[str, Any]]) -> float:
    """The share of float32 kernels in the time of a device's products; 0 of a processor."""
    products = wide = 0.0
    for event in events:
        if event.get("cat") == "kernel" and kind_of(event["name"]) == "products":
            products += event["dur"]
            wide += event["dur"] if any(word in event["name"].lower() for word in _WIDE_PRODUCTS) else 0.0
    return wide / products if products else 0.0
