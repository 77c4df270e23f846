"""Why an implementation runs a node of a bound graph: what could run it, how long each takes as far as is known, and
what decided (`strata.kernels.choose`); and what its kernels take of a multiprocessor."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import fx

from strata.cost.draw import duration
from strata.cost.nodes import NodeCost, node_costs
from strata.graph.walk import placed_arguments, walk
from strata.hardware.roofline import Workload
from strata.kernels import tuned
from strata.kernels.device_limits import DeviceLimits

if TYPE_CHECKING:  # which needs Triton
    from strata.kernels.compiling.launched import LaunchedKernel


@dataclass(frozen=True)
class Candidate:
    """kernels: that it would launch; None: it does not take these arguments. predicted, measured: seconds; None: not
    known, as of all that is not taken no more than the table lists."""

    name: str
    kernels: tuple[str, ...] | None
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Why:
    """candidates: in order of preference. taken: the name of the one that runs. reason: one clause."""

    node: NodeCost
    candidates: tuple[Candidate, ...]
    taken: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        node = {name: getattr(self.node, name) for name in ("name", "operation", "layer", "module", "shape")}
        found = [asdict(one) for one in self.candidates]
        return {"node": node, "candidates": found, "taken": self.taken, "reason": self.reason}

    def table(self) -> Table:
        layer = "" if self.node.layer is None else f" of layer {self.node.layer}"
        made = Table(title=f"{self.node.name}{layer}, {list(self.node.shape)}: {self.taken}: {self.reason}")
        for name in ("candidate", "runs", "kernels"):
            made.add_column(name, no_wrap=True)
        for name in ("predicted", "measured"):
            made.add_column(name, justify="right", no_wrap=True)
        for one in self.candidates:
            runs = "taken" if one.name == self.taken else "could" if one.kernels is not None else ""
            times = ("" if seconds is None else duration(seconds) for seconds in (one.predicted, one.measured))
            made.add_row(one.name, runs, ", ".join(one.kernels or ()), *times)
        return made


def why(
    graph: fx.GraphModule,
    argument: Any,
    asked: str,
    workload: Workload,
    limits: DeviceLimits,
    table: tuned.Table,
    predict: Callable[[NodeCost], float],
) -> Why:
    """The candidates of the first node that `asked` names: by itself, its operation, or its part of the model.

    argument, workload, limits: as for `node_costs`. table: of measured calls of the device. predict: seconds of a node
    by its kernels. Raises ValueError, with the names there are, if there is none.
    """
    costs = {node.name: node for node in node_costs(graph, argument, workload, limits)}
    for node, operation, args, *_ in walk(graph, argument):
        bound = node.meta.get("bound")
        if operation is None or bound is None or asked not in _names(costs[node.name]):
            continue
        cost, placed = costs[node.name], placed_arguments(limits, args)
        given, measured = operation.call_args(*placed), _measured(cost, table)
        taken, found = bound.choose(*placed), []
        for one in bound.candidates:
            kernels = one.launches(*given) if one.supports is None or one.supports(*given) else None
            predicted = predict(cost) if one is taken else None
            found.append(Candidate(one.name, kernels, predicted, measured.get(one.name)))
        reason = "nothing before it can run these arguments, and it can run any"
        if taken.name in measured:
            reason = "the device's table of measured calls prefers it"
        elif taken.supports is not None:
            reason = "the first in order of preference whose rule takes these arguments"
        return Why(cost, tuple(found), taken.name, reason)
    known = sorted({node.operation for node in costs.values()})
    raise ValueError(f"--why {asked}: no node of this step has that name; the operations are {', '.join(known)}")


def _names(node: NodeCost) -> tuple[str, ...]:
    return node.name, node.operation, node.module, *re.split("[.&+]", node.module)


def _measured(node: NodeCost, table: tuned.Table) -> dict[str, float]:
    """Seconds by the name of an implementation, of the call that the table lists for a product of so many rows."""
    if node.weight is None or node.scheme is not None:
        return {}
    rows = math.prod(node.shape[:-1])
    dtypes: Iterable[str] = dict.fromkeys(key.dtype for key in table)
    keys = (tuned.Key(node.operation, dtype, *node.weight, rows) for dtype in dtypes)
    choice = next((found for key in keys if (found := tuned.serving(table, key)) is not None), None)
    if choice is None:
        return {}
    own = f"{choice.implementation} measured" if choice.implementation == "cublaslt" else choice.implementation
    return {"cublas": choice.library_seconds, own: choice.seconds}


def occupancy_table(kernels: Sequence[LaunchedKernel]) -> Table:
    """A line for each that differs; how often it is launched."""
    made = Table(title="Kernels of Triton, of the model's graph; those of libraries are not known")
    made.add_column("kernel", no_wrap=True)
    for name in ("calls", "warps", "registers", "shared KiB", "blocks", "at once", "of warps", "waves"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("limit", no_wrap=True)
    for one, calls in Counter(kernels).items():
        found = one.occupancy
        figures = (calls, one.warps, one.registers, f"{one.shared_bytes / 1024:.1f}", one.blocks, found.resident)
        made.add_row(one.name, *map(str, figures), f"{found.warps:.0%}", f"{found.waves:.2f}", found.limit)
    return made
