"""From the seconds of a run down to the floor of its steps: data, checkpoints, messages, launches, kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from strata.cost.nodes import node_costs
from strata.graph.capture import capture
from strata.graph.walk import meta_indices
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.families import build
from strata.plan.explain.explanation import OperationTime
from strata.plan.training_explain.recorded_run import RecordedRun, Trace
from strata.plan.training_explain.run_floor import RunFloor
from strata.plan.waterfall import Part, Waterfall
from strata.train.predict.layer_costs import ATTENTIONS, MIXTURES

WARM_UP = "first steps: compiling, recording, warming up"
DATA = "waiting for data"
CHECKPOINTS = "checkpoints"
BETWEEN = "the host between steps"
SLOWEST = "waiting for the slowest rank"
MESSAGES = "messages that nothing hides"
BUBBLE = "pipeline bubbles"
AGAIN = "activations computed again"
LAUNCHES = "launches: the device waits within steps"
TRAFFIC = "norms, activations and copies"
PRODUCTS = "products and loss over their floor"
ATTENTION = "attention over its floor"
UPDATE = "update over its floor"
PASSES = "forward and backward over their floor"
REST = "kernels over their floor"

# A step that was recorded as CUDA graphs, among the host's phases.
REPLAYED = "replayed passes"
# A host that waits for the device for less of the time is behind it, if steps take so much longer than is likely.
_NEVER_WAITS, _LONGER = 0.02, 1.15
# Less of the measured time than this is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class ExplainedRun:
    """The waterfall, and the times of what the steps consist of as far as it was told."""

    waterfall: Waterfall
    operations: tuple[OperationTime, ...]

    def part(self, name: str) -> float:
        """Seconds of the part of that name; 0 if there is none."""
        return sum(part.seconds for part in self.waterfall.parts if part.name == name)

    def operation(self, *names: str) -> float:
        """Seconds of the operations of these names."""
        return sum(one.seconds for one in self.operations if one.name in names)


def explained_run(run: RecordedRun, floor: RunFloor) -> ExplainedRun:
    """What is between steps was measured; what is within them comes from traced steps, or on a processor from the
    host's phases, or is predicted, where neither was to be had."""
    parts = list(_between_steps(run))
    steady = run.steady
    inside = steady.seconds - sum(part.seconds for part in parts if part.name != WARM_UP)
    if run.slowest is not None:
        parts.append(Part(SLOWEST, "system", "scheduling", max(0.0, run.slowest[1]) * steady.seconds))
        inside -= parts[-1].seconds
    if run.trace is not None:
        operations = _traced(run, run.trace, floor, inside)
        parts += _of_trace(operations, floor, inside)
    elif run.what.kind == "cpu":
        operations = _of_host(run, floor, inside)
        parts += _of_phases(run, operations, floor)
    else:
        operations = ()
        parts += _predicted(run, floor, inside)
    kept = tuple(part for part in parts if part.seconds > _ROUNDING * run.seconds)
    return ExplainedRun(Waterfall(run.seconds, floor.seconds, kept), operations)


def _between_steps(run: RecordedRun) -> Iterator[Part]:
    """While the device has no step's work: the host waits for data, copies for a checkpoint, or does something else."""
    steady = run.steady
    yield Part(WARM_UP, "graph", "compilation", run.warm_up)
    left = max(0.0, steady.seconds - steady.device)
    for name, phase in ((DATA, "data"), (CHECKPOINTS, "checkpoint")):
        seconds = min(left, steady.phases.get(phase, 0.0))
        yield Part(name, "system", "host", seconds)
        left -= seconds
    yield Part(BETWEEN, "system", "host", left)


def _traced(run: RecordedRun, trace: Trace, floor: RunFloor, inside: float) -> tuple[OperationTime, ...]:
    """Kinds of work, in the shares that they had of the traced steps' time but for what was between these."""
    table, flops = trace.table, run.flops
    idle = max(0.0, table.seconds["idle"] - (run.seconds - run.warm_up - inside) / run.steps)
    whole = sum(seconds for kind, seconds in table.seconds.items() if kind != "idle") + idle
    scale = inside / whole
    ranks, moves = run.what.layout.ranks, _moved_bytes(run)
    floors = {
        "products": (floor.products, (flops.products + flops.head) // ranks, moves.products, "compute"),
        "attention": (floor.attention, flops.attention // ranks, moves.attention, "compute"),
        "optimizer": (floor.update, 0, floor.bytes, "memory"),
        "communication": (0.0, 0, 0, "communication"),
    }
    found = []
    for kind, seconds in table.seconds.items():
        if kind == "idle" or not seconds:
            continue
        least, count, moved, bound = floors.get(kind, (0.0, 0, 0, "memory"))
        found.append(OperationTime(kind, seconds * scale, least, count, moved, bound))
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _of_trace(operations: tuple[OperationTime, ...], floor: RunFloor, inside: float) -> Iterator[Part]:
    seconds = {one.name: one.seconds for one in operations}
    idle = max(0.0, inside - sum(seconds.values()))
    bubble = min(idle, floor.bubble)
    # On a processor the head's product is part of the loss.
    products = seconds.get("products", 0.0) + seconds.get("loss", 0.0) - floor.products
    again = min(max(0.0, products), floor.again)
    yield Part(MESSAGES, "system", "communication", seconds.get("communication", 0.0))
    yield Part(BUBBLE, "system", "scheduling", bubble)
    yield Part(AGAIN, "graph", "compute", again)
    yield Part(LAUNCHES, "graph", "launch", idle - bubble)
    yield Part(TRAFFIC, "graph", "memory", seconds.get("norms", 0.0) + seconds.get("other", 0.0))
    yield Part(PRODUCTS, "kernel", "compute", products - again)
    yield Part(ATTENTION, "kernel", "compute", seconds.get("attention", 0.0) - floor.attention)
    yield Part(UPDATE, "kernel", "memory", seconds.get("optimizer", 0.0) - floor.update)


def _of_host(run: RecordedRun, floor: RunFloor, inside: float) -> tuple[OperationTime, ...]:
    """By the host's phases, which on a processor are the work itself."""
    phases, moves = run.steady.phases, _moved_bytes(run)
    reduced, update = phases.get("reduce", 0.0), phases.get("update", 0.0)
    flops = run.flops.total // run.what.layout.ranks
    passes = max(0.0, inside - reduced - update)
    found = [
        OperationTime(
            "forward and backward",
            passes,
            floor.products + floor.attention,
            flops,
            moves.products + moves.attention,
            "compute",
        ),
        OperationTime("gradients' sum and norm", reduced, 0.0, 0, 0, "communication"),
        OperationTime("update", update, floor.update, 0, floor.bytes, "memory"),
    ]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _of_phases(run: RecordedRun, operations: tuple[OperationTime, ...], floor: RunFloor) -> Iterator[Part]:
    seconds = {one.name: one.seconds for one in operations}
    reduced = seconds["gradients' sum and norm"]
    if run.what.layout.ranks > 1:
        yield Part(MESSAGES, "system", "communication", reduced)
    else:
        yield Part("the gradients' norm", "kernel", "memory", reduced)
    yield Part(PASSES, "kernel", "compute", seconds["forward and backward"] - floor.products - floor.attention)
    yield Part(UPDATE, "kernel", "memory", seconds["update"] - floor.update)


def _predicted(run: RecordedRun, floor: RunFloor, inside: float) -> Iterator[Part]:
    """What a layout adds may be no more than there is beyond the floor."""
    launches = _launches(run, floor, inside)
    beyond = max(0.0, inside - launches - floor.seconds)
    added = floor.messages + floor.bubble + floor.again
    scale = min(1.0, beyond / added) if added else 0.0
    yield Part(MESSAGES, "system", "communication", floor.messages * scale)
    yield Part(BUBBLE, "system", "scheduling", floor.bubble * scale)
    yield Part(AGAIN, "graph", "compute", floor.again * scale)
    yield Part(LAUNCHES, "graph", "launch", launches)
    yield Part(REST, "kernel", "compute", beyond - added * scale)


def _launches(run: RecordedRun, floor: RunFloor, inside: float) -> float:
    """What steps take beyond what is likely, where the host launches them one kernel after another and never waits for
    the device: then the device waits for the host."""
    steady = run.steady
    if floor.likely is None or REPLAYED in steady.phases:
        return 0.0
    likely = run.steps * floor.likely.seconds * run.filled
    waits = steady.phases.get("log", 0.0) >= _NEVER_WAITS * steady.seconds
    return 0.0 if waits or inside < _LONGER * likely else inside - likely


@dataclass(frozen=True)
class _MovedBytes:
    """Of all steps, on one rank: operands read once, results written once. products: with the head."""

    products: int
    attention: int


def _moved_bytes(run: RecordedRun) -> _MovedBytes:
    """What products and attention of a run move, forward and backward, from its captured graph.

    Packs are taken to be alike, their sequences equally long, and ranks to share the work.
    """
    what, packs = run.what, max(1, run.packs)
    dtype = torch.bfloat16 if what.kind == "cuda" else torch.float32
    sequences = max(1, run.sequences // packs)
    length = max(1, run.tokens // packs // sequences)
    ids = meta_indices(sequences * length)
    lengths = (length,) * sequences
    with torch.device("meta"):
        graph = capture(build(what.model).to(dtype))
    batch = Batch(ids, ids, meta_indices(sequences + 1), length, None)
    found = {"products": 0, "attention": 0}
    for node in node_costs(graph, batch, Workload(lengths, lengths), gradients=True):
        if node.operation in ATTENTIONS:
            found["attention"] += node.cost.bytes + node.backward.bytes
        elif node.weight is not None or node.operation in MIXTURES:
            found["products"] += node.cost.bytes + node.backward.bytes
    vocabulary, hidden = what.model.vocab_size, what.model.hidden_size
    rows = run.flops.head // (6 * vocabulary * hidden)
    head = 3 * dtype.itemsize * (packs * vocabulary * hidden + rows * (hidden + vocabulary))
    ranks = what.layout.ranks
    return _MovedBytes((found["products"] * packs + head) // ranks, found["attention"] * packs // ranks)
