"""The quickest way to train that fits: every candidate's memory and predicted step."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from strata.comm.network import Network
from strata.hardware.links import Link
from strata.plan.training.candidates import candidates
from strata.plan.training.task import TrainingTask
from strata.train.predict.estimate import USABLE, Estimate, StepMemory, estimate, memory
from strata.train.predict.min_time import predicted_time
from strata.train.predict.rates import measured_rates
from strata.train.predict.step_shape import TrainShape

_OTHERS = 5
# What cannot come nearer to the best than this is not looked at.
_SPREAD = 1.25
_NO_NETWORK = Network(Link(0.0, 0.0, 1.0, "", ""), 1)


@dataclass(frozen=True)
class TrainingChoice:
    """A step, what it computes again, and what it is predicted to take."""

    shape: TrainShape
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.likely.seconds


@dataclass(frozen=True)
class Misfit:
    """A step that would be quicker if it fitted. memory: of the rank that needs the most."""

    shape: TrainShape
    recompute: str
    seconds: float
    memory: StepMemory


@dataclass(frozen=True)
class TrainingSearchResult:
    """best: the quickest step that fits. others: the next ones of other layouts, quickest first. misfit: the quickest
    that does not fit, if it is quicker than the best. searched: how many steps were looked at. usable: bytes of a
    device that a run may plan with.
    """

    best: TrainingChoice
    others: tuple[TrainingChoice, ...]
    misfit: Misfit | None
    searched: int
    usable: int


def search(task: TrainingTask) -> TrainingSearchResult:
    """Look at all candidates. Raises ValueError, with the bytes that are missing, if none fits, and where there is no
    layout of so many devices at all.
    """
    network, usable = task.reach(), int(USABLE * task.device.ceiling("memory").value)
    fitting: list[tuple[float, int, TrainShape, str]] = []
    misfit: Misfit | None = None
    least: tuple[int, TrainShape] | None = None
    quickest, searched = math.inf, 0
    work = _Work(task)
    for searched, shape in enumerate(candidates(task), 1):
        bound = work.seconds(shape)
        if bound > _SPREAD * quickest:
            continue
        smallest = memory(shape, shape.recomputes[-1])
        if least is None or smallest.total < least[0]:
            least = (smallest.total, shape)
        for recompute in shape.recomputes:
            needed = memory(shape, recompute)
            fits = needed.total <= usable
            if not fits and (recompute != shape.recomputes[0] or (misfit is not None and bound > misfit.seconds)):
                continue
            seconds = predicted_time(shape, recompute, task.device, network).seconds
            if fits:
                fitting.append((seconds, searched, shape, recompute))
                quickest = min(quickest, seconds)
                break
            if misfit is None or seconds < misfit.seconds:
                misfit = Misfit(shape, recompute, seconds, needed)
    if least is None:
        raise ValueError(_no_layout(task))
    if not fitting:
        raise ValueError(_too_large(task, *least, usable))
    chosen = _unlike(fitting, 1 + _OTHERS)
    best, *others = (TrainingChoice(shape, estimate(shape, task.device, fits, network)) for _, _, shape, fits in chosen)
    if misfit is not None and misfit.seconds >= best.seconds:
        misfit = None
    return TrainingSearchResult(best, tuple(others), misfit, searched, usable)


class _Work:
    """Products and attention of a task's step, shared out equally: less than any layout takes."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._one = TrainShape(task.config, task.sequence, task.sequence, 1, task.precision)
        time = predicted_time(self._one, "none", task.device)
        self._seconds = (time.products + time.attention) * task.sequences / task.gpus

    def seconds(self, shape: TrainShape) -> float:
        """At the rates of the layout of a step."""
        alone, divided = (measured_rates(one, self._task.device, _NO_NETWORK).wide for one in (self._one, shape))
        return self._seconds * alone / divided


def _unlike(fitting: list[tuple[float, int, TrainShape, str]], count: int) -> list[tuple[float, int, TrainShape, str]]:
    """The quickest of each division among ranks, the quickest first."""
    quickest: dict[tuple[int, ...], tuple[float, int, TrainShape, str]] = {}
    for one in fitting:
        layout = one[2].layout
        key = (layout.pp, layout.dp, layout.shard, layout.cp, layout.tp, layout.ep)
        if key not in quickest or one[:2] < quickest[key][:2]:
            quickest[key] = one
    return heapq.nsmallest(count, quickest.values(), key=lambda one: one[:2])


def _no_layout(task: TrainingTask) -> str:
    return (
        f"{task.sequences} sequences of {task.sequence} tokens cannot be shared out equally among {task.gpus} devices; "
        f"give a batch of a multiple of {task.gpus} sequences ({task.gpus * task.sequence} tokens), or fewer devices"
    )


def _too_large(task: TrainingTask, needed: int, shape: TrainShape, usable: int) -> str:
    layout, gib = shape.layout, 2**30
    return (
        f"no layout of {task.gpus} x {task.device.product} fits: the smallest step needs {needed / gib:.1f} GiB a "
        f"device and {usable / gib:.1f} are usable, {(needed - usable) / gib:.1f} too few (zero {layout.zero}, tp "
        f"{layout.tp}, pp {layout.pp}, shard {layout.shard}, {shape.tokens} tokens at once); use more devices or "
        f"larger ones, or shorter sequences"
    )
