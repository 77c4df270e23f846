"""Seconds of a run's steps, divided into the floor and what keeps them from it, operation by operation."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from strata.cost.nodes import NodeCost
from strata.cost.step_model import StepNodes, StepSeconds
from strata.hardware.roofline import floor
from strata.plan.explain.explanation import OperationTime, StepWork
from strata.plan.explain.measurement import MeasuredStep, Measurement, recomputed
from strata.plan.waterfall import Cause, Part

BOUNDS: Mapping[str, Cause] = {"compute": "compute", "memory": "memory", "communication": "communication"}
# Operations whose part of all is smaller are one part together.
_LEAST_SHARE = 0.01
TAKEN = "processors taken by other work"
LAUNCHES = "launches and host work inside steps"
PROMPTS = "prompts of other requests in the same steps"
NameOf = Callable[[NodeCost], str]


def operation_name(node: NodeCost) -> str:
    return node.operation


@dataclass(frozen=True)
class StepSplit:
    """Seconds of all steps: the floor and the parts add up to them. operations: the longest first. bound: what sets
    most of the floor."""

    floor: float
    parts: tuple[Part, ...]
    operations: tuple[OperationTime, ...]
    bound: Cause


@dataclass
class _Sum:
    """floors: seconds of the floor, by what sets them."""

    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    sent: int = 0
    floors: dict[str, float] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        return math.fsum(self.floors.values())

    def add(self, other: _Sum) -> None:
        self.seconds += other.seconds
        self.flops += other.flops
        self.bytes += other.bytes
        self.sent += other.sent
        _add(self.floors, other.floors)


@dataclass(frozen=True)
class _Share:
    """What of one step is not its operations' own work, and what is (busy), in seconds, as often as it counts. again,
    others: the shares of its work that were lost and done once more, and that are for other requests than those
    explained."""

    lost: float
    compiled: float
    idle: float
    busy: float
    again: float
    others: float
    count: float

    @property
    def own(self) -> float:
        """Which share is the requests' own work and counts, so often."""
        return self.count * self.own_share

    @property
    def own_share(self) -> float:
        return (1 - self.again) * (1 - self.others)


def split_steps(
    measured: Measurement,
    times: StepSeconds,
    name_of: NameOf = operation_name,
    others: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> StepSplit:
    """Steps alike in kind and size are priced by the one in their middle: its nodes' shares of the predicted time, or
    of the traced where there is a trace, divide what was measured. A floor never exceeds what was measured: caches may
    hold what it takes for read from memory.

    name_of: of a node, as the trace names it. others: of each step the share of its work that is for requests which are
    not those explained; None: all of it is. weights: how often each step counts; None: once.
    """
    again = recomputed(measured.steps)
    foreign = [0.0] * len(measured.steps) if others is None else others
    counts = [1.0] * len(measured.steps) if weights is None else weights
    groups: dict[tuple[StepWork, int, bool], list[int]] = defaultdict(list)
    for index, step in enumerate(measured.steps):
        if not counts[index]:
            continue
        groups[step.kind, (step.tokens - 1).bit_length(), step.eager].append(index)
    operations: dict[str, _Sum] = defaultdict(_Sum)
    beside: dict[str, float] = defaultdict(float)
    floors: dict[str, float] = {}
    for (kind, _, _), indices in groups.items():
        steps = [measured.steps[index] for index in indices]
        middle = middle_step(steps)
        nodes = times.model.step(middle.workload)
        given = [(again[index] / measured.steps[index].tokens, foreign[index], counts[index]) for index in indices]
        shares = _shares(steps, given, measured, nodes, times)
        for share in shares:
            beside["lost"] += share.lost
            beside["compiled"] += share.compiled
            beside["idle"] += share.idle
            beside["others"] += share.others * share.busy
            beside["again"] += share.again * (1 - share.others) * share.busy
        busy = math.fsum(share.busy * share.own_share for share in shares)
        padding = _padding(nodes, times, middle) * busy
        beside["padding"] += padding
        costs = _by_name(nodes, times, middle, name_of)
        traced = measured.traced.get(kind)
        kept = math.fsum(share.own for share in shares)
        for name, seconds in (_as_shares(traced.seconds) if traced else _predicted(costs)).items():
            cost = costs.get(name, _Sum())
            took = (busy - padding) * seconds
            counted = min(kept, took / cost.floor) if cost.floor else 0.0
            kept_floors = {bound: counted * least for bound, least in cost.floors.items()}
            operations[name].add(_Sum(took, round(kept * cost.flops), round(kept * cost.bytes), cost.sent, kept_floors))
        for step, share in zip(steps, shares, strict=True):
            least = times.floor(step.workload)
            _add(floors, {least.bound: share.own * least.seconds})
    summed = math.fsum(one.floor for one in operations.values())
    whole = min(math.fsum(floors.values()), summed)
    listed = sorted(operations.items(), key=lambda item: item[1].seconds, reverse=True)
    parts = [
        *_operation_parts(listed, sum(one.seconds for _, one in listed)),
        *_other_parts(beside, summed - whole),
    ]
    found_operations = tuple(
        OperationTime(name, one.seconds, one.floor, one.flops, one.bytes, _bound(one.floors)) for name, one in listed
    )
    return StepSplit(whole, tuple(part for part in parts if part.seconds), found_operations, _bound(floors))


def middle_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step nearest to the mean of tokens and of keys."""
    sizes = [(step.tokens, sum(step.workload.total)) for step in steps]
    tokens, keys = (statistics.fmean(column) or 1.0 for column in zip(*sizes, strict=True))
    away = [abs(one / tokens - 1) + abs(of_keys / keys - 1) for one, of_keys in sizes]
    return steps[away.index(min(away))]


def _shares(
    steps: Sequence[MeasuredStep],
    given: Sequence[tuple[float, float, float]],
    measured: Measurement,
    nodes: StepNodes,
    times: StepSeconds,
) -> list[_Share]:
    usual = statistics.median([step.seconds for step in steps if not step.compiled] or [0.0])
    traced = measured.traced.get(steps[0].kind)
    idle_share = 0.0
    if traced is not None:
        idle_share = max(0.0, 1 - math.fsum(traced.seconds.values()) / traced.whole)
    elif (steps[0].eager or not nodes.recorded) and not measured.host_is_device:
        idle_share = _waits_for_launches(nodes, times, middle_step(steps), usual)
    found = []
    for step, (again, others, count) in zip(steps, given, strict=True):
        compiled = max(0.0, step.seconds - usual) if step.compiled and usual else 0.0
        lost = min(_lost(step, times), step.seconds - compiled)
        rest = step.seconds - compiled - lost
        busy = rest * (1 - idle_share) if step.busy is None else min(step.busy, rest)
        found.append(_Share(count * lost, count * compiled, count * (rest - busy), count * busy, again, others, count))
    return found


def _waits_for_launches(nodes: StepNodes, times: StepSeconds, step: MeasuredStep, usual: float) -> float:
    """The share of an eager step in which its device waits for the host. usual: seconds of steps like it.

    Where launches take longer than the work, they are all that a step is longer than its work: hosts differ, and so
    does what a launch takes.
    """
    own = [*nodes.inputs, *nodes.model, *nodes.draw]
    launches = times.predictor.launches(len(own))
    work = math.fsum(times.predictor.node(node, step.workload).seconds for node in own)
    return max(0.0, 1 - work / (usual or launches)) if launches > work else 0.0


def _lost(step: MeasuredStep, times: StepSeconds) -> float:
    """Seconds of a step for which other work had the processor. A GPU goes on with what it has, so there it is no more
    than the step took longer than predicted."""
    if step.processor is not None:
        return max(0.0, step.seconds - step.processor)
    if step.compiled or not step.delayed:  # compilers are processes, for which its thread waits
        return 0.0
    return min(step.delayed, max(0.0, step.seconds - times.seconds(step.workload)))


def _padding(nodes: StepNodes, times: StepSeconds, step: MeasuredStep) -> float:
    """The share of a recorded step that pads it."""
    if not nodes.recorded or step.eager:
        return 0.0
    own = [*nodes.inputs, *nodes.model, *nodes.draw]
    real, padded = (
        math.fsum(times.predictor.node(node, step.workload).seconds for node in each) for each in (own, nodes.timed)
    )
    return max(0.0, 1 - real / padded)


def _by_name(
    nodes: StepNodes,
    times: StepSeconds,
    step: MeasuredStep,
    name_of: NameOf,
) -> dict[str, _Sum]:
    """Of one step: predicted seconds, floor and work of the nodes of each name."""
    found: dict[str, _Sum] = defaultdict(_Sum)
    for node in (*nodes.inputs, *nodes.model, *nodes.draw):
        least = floor(node.cost, times.device, times.dtype, times.link)
        seconds, cost = times.predictor.node(node, step.workload).seconds, node.cost
        found[name_of(node)].add(_Sum(seconds, cost.flops, cost.bytes, cost.sent, {least.bound: least.seconds}))
    return found


def _predicted(costs: Mapping[str, _Sum]) -> dict[str, float]:
    return _as_shares({name: cost.seconds for name, cost in costs.items()})


def _as_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = math.fsum(seconds.values())
    return {name: one / whole for name, one in seconds.items()}


def _add(floors: dict[str, float], more: Mapping[str, float]) -> None:
    for bound, seconds in more.items():
        floors[bound] = floors.get(bound, 0.0) + seconds


def _bound(floors: Mapping[str, float]) -> Cause:
    """What sets most of them."""
    return BOUNDS[max(floors, key=lambda bound: floors[bound], default="memory")]


def _operation_parts(listed: Sequence[tuple[str, _Sum]], whole: float) -> list[Part]:
    parts, small = [], _Sum()
    for name, one in listed:
        over = one.seconds - one.floor
        if one.sent:
            parts.append(Part(f"{name}: messages between ranks", "system", "communication", over))
        elif over < _LEAST_SHARE * whole:
            small.add(one)
        else:
            parts.append(Part(f"{name} over its floor", "kernel", _bound(one.floors), over))
    over = small.seconds - small.floor
    return [*parts, Part("other operations over their floors", "kernel", _bound(small.floors), over)]


def _other_parts(beside: Mapping[str, float], between: float) -> list[Part]:
    return [
        Part("values that operations hand on through memory", "graph", "memory", between),
        Part("padding of recorded steps", "graph", "padding", beside["padding"]),
        Part(LAUNCHES, "graph", "launch", beside["idle"]),
        Part("tokens computed again after preemption", "system", "preemption", beside["again"]),
        Part(PROMPTS, "system", "scheduling", beside["others"]),
        Part("compilation", "system", "compilation", beside["compiled"]),
        Part(TAKEN, "system", "host", beside["lost"]),
    ]
