"""Seconds of a run's steps, divided into the floor and what keeps them from it, operation by operation."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from strata.cost.nodes import NodeCost
from strata.cost.step_model import StepModel, StepNodes
from strata.engine.watch.verdict import Cause, Layer
from strata.hardware.roofline import floor
from strata.plan.explain.explanation import LostTime, OperationTime, StepWork
from strata.plan.explain.measurement import MeasuredStep, Measurement, recomputed

BOUNDS: Mapping[str, Cause] = {"compute": "compute", "memory": "memory", "communication": "communication"}
# Operations whose part of all is smaller are one part together.
_MIN_SHARE = 0.01
TAKEN = "processors taken by other work"
LAUNCHES = "launches and host work inside steps"
PROMPTS = "prompts of other requests in the same steps"
_PADDING, _AGAIN, _COMPILED = "padding of captured steps", "tokens computed again after preemption", "compilation"
_BESIDE: Mapping[str, tuple[Layer, Cause]] = {
    _PADDING: ("graph", "padding"),
    LAUNCHES: ("graph", "launch"),
    _AGAIN: ("system", "preemption"),
    PROMPTS: ("system", "scheduling"),
    _COMPILED: ("system", "compilation"),
    TAKEN: ("system", "host"),
}
NameOf = Callable[[NodeCost], str]


def operation_name(node: NodeCost) -> str:
    return node.operation


@dataclass(frozen=True)
class StepSplit:
    """Seconds of all steps: the floor and the parts add up to them. operations: the longest first. bound: what sets
    most of the floor."""

    floor: float
    parts: tuple[LostTime, ...]
    operations: tuple[OperationTime, ...]
    bound: Cause


@dataclass
class _Sum:
    """floors: seconds of the floor, by what sets them."""

    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    sent: int = 0
    floors: Counter[str] = field(default_factory=Counter)

    @property
    def floor(self) -> float:
        return math.fsum(self.floors.values())

    def add(self, seconds: float, flops: int, nbytes: int, sent: int, floors: Mapping[str, float]) -> None:
        self.seconds += seconds
        self.flops += flops
        self.bytes += nbytes
        self.sent += sent
        self.floors.update(floors)


def split_steps(
    measured: Measurement,
    times: StepModel,
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
    groups: dict[tuple[StepWork, int, bool], list[int]] = defaultdict(list)
    for index, step in enumerate(measured.steps):
        if weights is None or weights[index]:
            groups[step.kind, (step.tokens - 1).bit_length(), step.eager].append(index)
    operations: dict[str, _Sum] = defaultdict(_Sum)
    beside: dict[str, float] = defaultdict(float)
    floors: dict[str, float] = defaultdict(float)
    for (kind, _, _), indices in groups.items():
        steps = [measured.steps[index] for index in indices]
        middle = middle_step(steps)
        nodes = times.model.step(middle.workload)
        usual = statistics.median([step.seconds for step in steps if not step.compiled] or [0.0])
        idle_share = _idle_share(measured, nodes, times, middle, usual)
        busy = kept = 0.0
        for index, step in zip(indices, steps, strict=True):
            count = 1.0 if weights is None else weights[index]
            foreign, lost = 0.0 if others is None else others[index], again[index] / step.tokens
            compiled = max(0.0, step.seconds - usual) if step.compiled and usual else 0.0
            taken = min(_lost(step, times), step.seconds - compiled)
            rest = step.seconds - compiled - taken
            worked = rest * (1 - idle_share) if step.busy is None else min(step.busy, rest)
            beside[_COMPILED] += count * compiled
            beside[TAKEN] += count * taken
            beside[LAUNCHES] += count * (rest - worked)
            beside[PROMPTS] += count * worked * foreign
            beside[_AGAIN] += count * worked * lost * (1 - foreign)
            own = count * (1 - lost) * (1 - foreign)  # the requests' own work, as often as it counts
            busy, kept = busy + worked * own, kept + own
            least = times.floor(step.workload)
            floors[least.bound] += own * least.seconds
        padding = _padding(nodes, times, middle) * busy
        beside[_PADDING] += padding
        costs = _by_name(nodes, times, middle, name_of)
        traced = measured.traced.get(kind)
        told = traced.seconds if traced else {name: cost.seconds for name, cost in costs.items()}
        whole = math.fsum(told.values())
        for name, seconds in told.items():
            cost = costs.get(name, _Sum())
            took = (busy - padding) * (seconds / whole)
            counted = min(kept, took / cost.floor) if cost.floor else 0.0
            kept_floors = {bound: counted * least for bound, least in cost.floors.items()}
            operations[name].add(took, round(kept * cost.flops), round(kept * cost.bytes), cost.sent, kept_floors)
    summed = math.fsum(one.floor for one in operations.values())
    min_of_all = min(math.fsum(floors.values()), summed)
    listed = sorted(operations.items(), key=lambda item: item[1].seconds, reverse=True)
    between = LostTime("values that operations hand on through memory", "graph", "memory", summed - min_of_all)
    parts = [*_operation_parts(listed, sum(one.seconds for _, one in listed)), between]
    parts += (LostTime(name, *_BESIDE[name], seconds) for name, seconds in beside.items())
    found_operations = tuple(
        OperationTime(name, one.seconds, one.floor, one.flops, one.bytes, _bound(one.floors)) for name, one in listed
    )
    return StepSplit(min_of_all, tuple(part for part in parts if part.seconds), found_operations, _bound(floors))


def middle_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step nearest to the mean of tokens and of keys."""
    sizes = [(step.tokens, sum(step.workload.total)) for step in steps]
    tokens, keys = (statistics.fmean(column) or 1.0 for column in zip(*sizes, strict=True))
    away = [abs(one / tokens - 1) + abs(of_keys / keys - 1) for one, of_keys in sizes]
    return steps[away.index(min(away))]


def _idle_share(measured: Measurement, nodes: StepNodes, times: StepModel, step: MeasuredStep, usual: float) -> float:
    """Of steps like this one, in which their device waits for the host."""
    traced = measured.traced.get(step.kind)
    if traced is not None:
        return max(0.0, 1 - math.fsum(traced.seconds.values()) / traced.whole)
    is_launched = (step.eager or not nodes.captured) and not measured.host_is_device
    return _waits_for_launches(nodes, times, step, usual) if is_launched else 0.0


def _waits_for_launches(nodes: StepNodes, times: StepModel, step: MeasuredStep, usual: float) -> float:
    """The share of an eager step in which its device waits for the host. usual: seconds of steps like it.

    Where launches take longer than the work, they are all that a step is longer than its work: hosts differ, and so
    does what a launch takes.
    """
    launches = times.predictor.launches(len(nodes.nodes))
    work = math.fsum(times.predictor.node(node, step.workload).seconds for node in nodes.nodes)
    return max(0.0, 1 - work / (usual or launches)) if launches > work else 0.0


def _lost(step: MeasuredStep, times: StepModel) -> float:
    """Seconds of a step for which other work had the processor. A GPU goes on with what it has, so there it is no more
    than the step took longer than predicted."""
    if step.processor is not None:
        return max(0.0, step.seconds - step.processor)
    if step.compiled or not step.delayed:  # compilers are processes, for which its thread waits
        return 0.0
    return min(step.delayed, max(0.0, step.seconds - times.seconds(step.workload)))


def _padding(nodes: StepNodes, times: StepModel, step: MeasuredStep) -> float:
    """The share of a captured step that pads it."""
    if not nodes.captured or step.eager:
        return 0.0
    real, padded = (
        math.fsum(times.predictor.node(node, step.workload).seconds for node in each)
        for each in (nodes.nodes, nodes.timed)
    )
    return max(0.0, 1 - real / padded)


def _by_name(nodes: StepNodes, times: StepModel, step: MeasuredStep, name_of: NameOf) -> dict[str, _Sum]:
    """Of one step: predicted seconds, floor and work of the nodes of each name."""
    found: dict[str, _Sum] = defaultdict(_Sum)
    for node in nodes.nodes:
        least = floor(node.cost, times.device, times.dtype, times.link)
        seconds, cost = times.predictor.node(node, step.workload).seconds, node.cost
        found[name_of(node)].add(seconds, cost.flops, cost.bytes, cost.sent, {least.bound: least.seconds})
    return found


def _bound(floors: Mapping[str, float]) -> Cause:
    """What sets most of them."""
    return BOUNDS[max(floors, key=lambda bound: floors[bound], default="memory")]


def _operation_parts(listed: Sequence[tuple[str, _Sum]], whole: float) -> list[LostTime]:
    parts, small, floors = [], 0.0, Counter[str]()
    for name, one in listed:
        over = one.seconds - one.floor
        if one.sent:
            parts.append(LostTime(f"{name}: messages between ranks", "system", "communication", over))
        elif over < _MIN_SHARE * whole:
            small += over
            floors.update(one.floors)
        else:
            parts.append(LostTime(f"{name} over its floor", "kernel", _bound(one.floors), over))
    return [*parts, LostTime("other operations over their floors", "kernel", _bound(floors), small)]
