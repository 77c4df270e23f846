"""From the seconds of a run down to the floor of its steps: data, checkpoints, messages, launches, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strata.engine.watch.verdict import Cause, Layer
from strata.plan.explain.explanation import Explained, LostTime, OperationTime
from strata.plan.training_explain.recorded_run import RecordedRun
from strata.plan.training_explain.run_floor import RunFloor
from strata.train.predict.layer_costs import PassCost

WARM_UP = "first steps: compiling, capturing, warming up"
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
REST = "kernels over their floor"
# Where the time of an operation beyond its floor goes. On a processor the head's product is part of the loss.
_OVER: Mapping[str, tuple[str, Layer, Cause]] = {
    "products": (PRODUCTS, "kernel", "compute"),
    "loss": (PRODUCTS, "kernel", "compute"),
    "attention": (ATTENTION, "kernel", "compute"),
    "norms": (TRAFFIC, "graph", "memory"),
    "other": (TRAFFIC, "graph", "memory"),
    "optimizer": (UPDATE, "kernel", "memory"),
    "communication": (MESSAGES, "system", "communication"),
    "forward and backward": ("forward and backward over their floor", "kernel", "compute"),
    "gradients' sum": (MESSAGES, "system", "communication"),
    "gradients' norm": ("the gradients' norm", "kernel", "memory"),
    "update": (UPDATE, "kernel", "memory"),
}

# A step that was captured as CUDA graphs, among the host's phases.
REPLAYED = "replayed passes"
# A host that waits for the device for less of the time is behind it, if steps take so much longer than is likely.
_NEVER_WAITS, _LONGER = 0.02, 1.15


def explained_run(run: RecordedRun, floor: RunFloor) -> Explained:
    """What is between steps was measured; what is within them comes from traced steps, or on a processor from the
    host's phases, or is predicted, where neither was to be had."""
    parts = list(_between_steps(run))
    inside = run.steady.seconds - sum(part.seconds for part in parts if part.name != WARM_UP)
    if run.slowest is not None:
        parts.append(LostTime(SLOWEST, "system", "scheduling", max(0.0, run.slowest[1]) * run.steady.seconds))
        inside -= parts[-1].seconds
    operations: tuple[OperationTime, ...] = ()
    if run.trace is not None:
        operations = tuple(_traced(run, floor, inside))
        parts += _beside(operations, floor, inside)
    elif run.what.kind == "cpu":
        operations = tuple(_of_host(run, floor, inside))
    else:
        parts += _predicted(run, floor, inside)
    parts += (LostTime(*_OVER[one.name], one.seconds - one.floor) for one in operations)
    return Explained.of(run.whole.seconds, floor.seconds, parts, operations, "compute")


def _between_steps(run: RecordedRun) -> Iterator[LostTime]:
    """While the device has no step's work: the host waits for data, copies for a checkpoint, or does something else."""
    steady = run.steady
    yield LostTime(WARM_UP, "graph", "compilation", run.warm_up)
    left = max(0.0, steady.seconds - steady.device)
    for name, phase in ((DATA, "data"), (CHECKPOINTS, "checkpoint")):
        seconds = min(left, steady.phases.get(phase, 0.0))
        yield LostTime(name, "system", "host", seconds)
        left -= seconds
    yield LostTime(BETWEEN, "system", "host", left)


def _traced(run: RecordedRun, floor: RunFloor, inside: float) -> Iterator[OperationTime]:
    """Kinds of work, in the shares that they had of the traced steps' time but for what was between these."""
    assert run.trace is not None
    table, flops, ranks = run.trace.table, run.whole.flops, run.what.layout.ranks
    idle = max(0.0, table.seconds["idle"] - (run.whole.seconds - run.warm_up - inside) / run.whole.steps)
    whole = sum(seconds for kind, seconds in table.seconds.items() if kind != "idle") + idle
    products, attention = _moved_bytes(run, floor)
    floors = {
        "products": (floor.products, (flops.products + flops.head) // ranks, products, "compute"),
        "attention": (floor.attention, flops.attention // ranks, attention, "compute"),
        "optimizer": (floor.update, 0, floor.bytes, "memory"),
        "communication": (0.0, 0, 0, "communication"),
    }
    for kind, seconds in table.seconds.items():
        if kind != "idle" and seconds:
            yield OperationTime(kind, seconds * inside / whole, *floors.get(kind, (0.0, 0, 0, "memory")))


def _beside(operations: tuple[OperationTime, ...], floor: RunFloor, inside: float) -> Iterator[LostTime]:
    """When nothing runs: bubbles as far as they are predicted, else launches. And what of products is done again."""
    seconds = {one.name: one.seconds for one in operations}
    idle = max(0.0, inside - sum(seconds.values()))
    bubble = min(idle, floor.bubble)
    products = seconds.get("products", 0.0) + seconds.get("loss", 0.0) - floor.products
    again = min(max(0.0, products), floor.again)
    yield LostTime(BUBBLE, "system", "scheduling", bubble)
    yield LostTime(LAUNCHES, "graph", "launch", idle - bubble)
    yield LostTime(AGAIN, "graph", "compute", again)
    yield LostTime(PRODUCTS, "kernel", "compute", -again)


def _of_host(run: RecordedRun, floor: RunFloor, inside: float) -> Iterator[OperationTime]:
    """By the host's phases, which on a processor are the work itself."""
    phases, ranks = run.steady.phases, run.what.layout.ranks
    reduced, update = phases.get("reduce", 0.0), phases.get("update", 0.0)
    passes, least = max(0.0, inside - reduced - update), floor.products + floor.attention
    moved = sum(_moved_bytes(run, floor))
    yield OperationTime("forward and backward", passes, least, run.whole.flops.total // ranks, moved, "compute")
    name, bound = ("gradients' sum", "communication") if ranks > 1 else ("gradients' norm", "memory")
    yield OperationTime(name, reduced, 0.0, 0, 0, bound)
    yield OperationTime("update", update, floor.update, 0, floor.bytes, "memory")


def _predicted(run: RecordedRun, floor: RunFloor, inside: float) -> Iterator[LostTime]:
    """What a layout adds may be no more than there is beyond the floor."""
    launches = _launches(run, floor, inside)
    beyond = max(0.0, inside - launches - floor.seconds)
    added = floor.messages + floor.bubble + floor.again
    scale = min(1.0, beyond / added) if added else 0.0
    yield LostTime(MESSAGES, "system", "communication", floor.messages * scale)
    yield LostTime(BUBBLE, "system", "scheduling", floor.bubble * scale)
    yield LostTime(AGAIN, "graph", "compute", floor.again * scale)
    yield LostTime(LAUNCHES, "graph", "launch", launches)
    yield LostTime(REST, "kernel", "compute", beyond - added * scale)


def _launches(run: RecordedRun, floor: RunFloor, inside: float) -> float:
    """What steps take beyond what is likely, where the host launches them one kernel after another and never waits for
    the device: then the device waits for the host."""
    steady = run.steady
    if floor.likely is None or REPLAYED in steady.phases:
        return 0.0
    likely = run.whole.steps * floor.likely.seconds * run.filled
    waits = steady.phases.get("log", 0.0) >= _NEVER_WAITS * steady.seconds
    return 0.0 if waits or inside < _LONGER * likely else inside - likely


def _moved_bytes(run: RecordedRun, floor: RunFloor) -> tuple[int, int]:
    """What products, with the head, and attention of all steps move, forward and backward, on one rank: operands read
    once, results written once. Ranks are taken to share the work."""
    model, ranks, wide = run.what.model, run.what.layout.ranks, 1 if run.what.kind == "cuda" else 2
    work = sum((one.forward + one.backward for one in floor.shape.layer_costs), PassCost())
    rows = run.whole.flops.head // (6 * model.vocab_size * model.hidden_size)
    head = 6 * (run.whole.packs * model.vocab_size * model.hidden_size + rows * (model.hidden_size + model.vocab_size))
    products = run.whole.tokens * work.moved + run.whole.packs * work.weights + head
    return wide * products // ranks, wide * run.whole.tokens * work.attended // floor.shape.length // ranks
