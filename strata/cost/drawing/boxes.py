"""The boxes of a drawing: kernels with what they cost and the least time that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.cost.draw import duration, quantity, share
from strata.cost.nodes import NodeCost
from strata.graph.reads import Read
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import floor


@dataclass(frozen=True)
class Box:
    """One node. label: of the modules whose work it does, & between merged and + between fused ones. by: what runs it,
    and the kernels of that. seconds: its floor; bound: what sets the floor. took: seconds that were measured; None:
    nobody looked."""

    name: str
    operation: str
    label: str
    by: tuple[str, ...]
    layer: int | None
    reads: tuple[Read, ...]
    figures: str
    weights: int
    seconds: float
    bound: str
    took: float | None = None


def boxes(
    nodes: Sequence[NodeCost],
    device: Device,
    dtype: str,
    link: Link | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[Box]:
    """In the order of the nodes. measured: seconds of each, by its name."""
    found = []
    for node in nodes:
        least = floor(node.cost, device, dtype, link)
        work, moved = quantity(node.cost.flops), quantity(node.cost.bytes)
        figures = f"{work}FLOP · {moved}B · floor {duration(least.seconds)}"
        took = None if measured is None else measured.get(node.name)
        if took is not None:
            near = share(least.seconds, took)
            figures += f" · took {duration(took)}" + f" ({near})" * bool(near)
        found.append(
            Box(
                node.name,
                node.operation,
                _label(node),
                (node.implementation, *node.kernels) if node.implementation else (),
                node.layer,
                node.reads,
                figures,
                node.cost.weights,
                least.seconds,
                least.bound if least.seconds else "",
                took,
            )
        )
    return found


def _label(node: NodeCost) -> str:
    """A node without a part of the model of its own goes by its operation."""
    part = node.module.rpartition(".")[2]
    label = part if node.parameters or "+" in part else node.operation
    return label.replace("&", " & ").replace("+", " + ")
