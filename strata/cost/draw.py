"""Tables of what a graph costs and of the least time a device needs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from strata.cost.nodes import NodeCost, parameter_count, total
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import Cost, floor


@dataclass(frozen=True)
class CostRow:
    """Nodes of a kind: an operation, and the part of the model that it serves if that is known by name.

    kernels: of all nodes, a library's as far as they are known. seconds: the floor of each node, added up; `bound` is
    what sets most of that time. step_seconds: the part in the floor of the whole step. measured: seconds that they
    took; None: nobody looked.
    """

    operation: str
    part: str
    implementation: str
    count: int
    kernels: int
    parameters: int
    cost: Cost
    seconds: float
    bound: str
    step_seconds: float
    measured: float | None = None


NodeKind = tuple[str, str, str]  # an operation, a part of the model, an implementation; each may be empty


def rows_by(
    nodes: Iterable[NodeCost],
    kind: Callable[[NodeCost], NodeKind],
    device: Device,
    dtype: str,
    bound: str = "",
    link: Link | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[CostRow]:
    """A row for each (operation, part, implementation) that `kind` gives, in the order in which they first occur.

    bound: what sets the floor of the step, "compute", "memory" or "communication"; empty for what is not counted
    in it. link: on which messages go, None if there are none. measured: seconds of each node, by its name.
    """
    groups: dict[NodeKind, list[NodeCost]] = {}
    for node in nodes:
        groups.setdefault(kind(node), []).append(node)
    found = []
    for names, group in groups.items():
        row = _row(names, group, device, dtype, bound, link)
        known = measured is not None and all(node.name in measured for node in group)
        found.append(replace(row, measured=sum(measured[node.name] for node in group) if known and measured else None))
    return found


def _row(
    names: NodeKind, nodes: list[NodeCost], device: Device, dtype: str, step_bound: str, link: Link | None
) -> CostRow:
    seconds = {"compute": 0.0, "memory": 0.0, "communication": 0.0}
    for node in nodes:
        least = floor(node.cost, device, dtype, link)
        seconds[least.bound] += least.seconds
    bound = max(seconds, key=seconds.__getitem__)
    kernels, parameters, cost = sum(len(node.kernels) for node in nodes), parameter_count(nodes), total(nodes)
    in_step = getattr(floor(cost.in_step, device, dtype, link), step_bound) if step_bound else 0.0
    return CostRow(*names, len(nodes), kernels, parameters, cost, sum(seconds.values()), bound, in_step)


def counts_table(before: Mapping[str, int], after: Mapping[str, int]) -> Table:
    """How often each operation stands in a graph before and after the passes."""
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("")
    for name in ("traced", "run"):
        drawn.add_column(name, justify="right")
    for name in dict.fromkeys([*before, *after]):
        drawn.add_row(name, *(f"{counts[name]:,}" if name in counts else "" for counts in (before, after)))
    return drawn


def table(title: str, rows: list[CostRow], *, whole: float) -> Table:
    """Rows as a table; `whole` is the floor of the step, in seconds, that shares refer to. Bytes that a rank sends have
    a column where there are any, and kernels where they are known."""
    sends, took = any(row.cost.sent for row in rows), any(row.measured is not None for row in rows)
    named = any(row.kernels or row.implementation for row in rows)
    drawn = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("", overflow="fold", min_width=16)
    for name in (
        "count",
        *("kernels",) * named,
        "FLOPs",
        "bytes",
        *("sent",) * sends,
        "floor",
        *("measured", "") * took,
    ):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("bound", no_wrap=True)
    drawn.add_column("of step", justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row.part or row.operation,
            f"{row.count:,}",
            *(f"{row.kernels:,} {row.implementation}",) * named,
            quantity(row.cost.flops),
            f"{quantity(row.cost.bytes)}B",
            *(f"{quantity(row.cost.sent)}B" if row.cost.sent else "",) * sends,
            duration(row.seconds),
            *(_measured(row) if took else ()),
            row.bound if row.seconds else "",
            f"{row.step_seconds / whole:.1%}" if row.step_seconds else "",
        )
    return drawn


def _measured(row: CostRow) -> tuple[str, str]:
    return ("", "") if row.measured is None else (duration(row.measured), share(row.seconds, row.measured))


def share(floor: float, measured: float) -> str:
    """How near a time came to its floor."""
    return f"{floor / measured:.0%}" if floor and measured else ""


def quantity(value: float) -> str:
    """A count with three digits and an SI prefix: 405853388800 is "406 G"."""
    prefixes = iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while value >= 999.5:
        value, prefix = value / 1000, next(prefixes, "E")
    digits = 3 - len(str(int(value))) if prefix else 0
    return f"{value:.{digits}f} {prefix}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, with three digits or so; differences may be negative."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"
