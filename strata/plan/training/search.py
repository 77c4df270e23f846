"""The quickest way to train that fits: every candidate's memory and predicted step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from strata.comm.cost import Network
from strata.hardware.links import Link
from strata.plan.training.candidates import candidates
from strata.plan.training.task import TrainingTask
from strata.train.predict.estimate import USABLE, Estimate, estimate, memory
from strata.train.predict.min_time import predicted_time
from strata.train.predict.rates import measured_rates
from strata.train.predict.step_shape import TrainShape

_OTHERS = 5
# What cannot come nearer to the best than this is not looked at.
_SPREAD = 1.25
_NO_NETWORK = Network(Link(0.0, 0.0, 1.0, "", ""), 1)


class _Candidate(NamedTuple):
    """A step, what it computes again, and its predicted seconds. number: of its layout, in the order of candidates."""

    seconds: float
    number: int
    shape: TrainShape
    recompute: str

    @property
    def division(self) -> tuple[int, ...]:
        """Among ranks."""
        layout = self.shape.layout
        return layout.pp, layout.dp, layout.shard, layout.cp, layout.tp, layout.ep


@dataclass(frozen=True)
class TrainingSearchResult:
    """best: the quickest step that fits. others: the next ones of other layouts, quickest first. misfit: the quickest
    that does not fit, if it is quicker than the best. searched: how many steps were looked at. usable: bytes of a
    device that a run may plan with.
    """

    best: Estimate
    others: tuple[Estimate, ...]
    misfit: Estimate | None
    searched: int
    usable: int


def search(task: TrainingTask) -> TrainingSearchResult:
    """Look at all candidates. Raises ValueError, with the bytes that are missing, if none fits, and where there is no
    layout of so many devices at all.
    """
    network, usable = task.reach(), int(USABLE * task.device.ceiling("memory").value)
    fitting: list[_Candidate] = []
    misfit: _Candidate | None = None
    least: tuple[int, TrainShape] | None = None
    quickest, searched = math.inf, 0
    work = _shared_work(task)
    for searched, shape in enumerate(candidates(task), 1):
        bound = work(shape)
        if bound > _SPREAD * quickest:
            continue
        smallest = memory(shape, shape.recomputes[-1]).total
        if least is None or smallest < least[0]:
            least = (smallest, shape)
        for recompute in shape.recomputes:
            fits = memory(shape, recompute).total <= usable
            if not fits and (recompute != shape.recomputes[0] or (misfit is not None and bound > misfit.seconds)):
                continue
            seconds = predicted_time(shape, recompute, task.device, network).seconds
            found = _Candidate(seconds, searched, shape, recompute)
            if fits:
                fitting.append(found)
                quickest = min(quickest, seconds)
                break
            misfit = found if misfit is None else min(misfit, found, key=lambda one: one.seconds)
    if least is None:
        raise ValueError(_no_layout(task))
    if not fitting:
        raise ValueError(_too_large(task, *least, usable))
    best, *others = (_estimate(task, one) for one in _unlike(fitting, 1 + _OTHERS))
    larger = _estimate(task, misfit) if misfit is not None and misfit.seconds < quickest else None
    return TrainingSearchResult(best, tuple(others), larger, searched, usable)


def _estimate(task: TrainingTask, one: _Candidate) -> Estimate:
    return estimate(one.shape, task.device, one.recompute, task.reach())


def _shared_work(task: TrainingTask) -> Callable[[TrainShape], float]:
    """Seconds of products and attention of a task's step, shared out equally, at the rates of the layout of a step:
    less than any layout takes."""
    one = TrainShape(task.config, task.sequence, task.sequence, 1, task.precision)
    time = predicted_time(one, "none", task.device)
    seconds = (time.products + time.attention) * task.sequences / task.gpus
    alone = measured_rates(one, task.device, _NO_NETWORK).wide
    return lambda shape: seconds * alone / measured_rates(shape, task.device, _NO_NETWORK).wide


def _unlike(fitting: list[_Candidate], count: int) -> list[_Candidate]:
    """The quickest of each division among ranks, the quickest first."""
    quickest: dict[tuple[int, ...], _Candidate] = {}
    for one in sorted(fitting, key=lambda one: one[:2]):
        quickest.setdefault(one.division, one)
    return list(quickest.values())[:count]


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
