"""The boxes of a drawing: kernels with what they cost and the least time that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.graph.cost import NodeCost
from strata.graph.draw import duration, quantity
from strata.graph.reads import Read
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import floor


@dataclass(frozen=True)
class Box:
    """One node. label: of the modules whose work it does, & between merged and + between fused ones. by: what runs it,
    and the kernels of that. seconds: its floor; bound: what sets the floor."""

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


def boxes(nodes: Sequence[NodeCost], device: Device, dtype: str, link: Link | None = None) -> list[Box]:
    """In the order of the nodes."""
    found = []
    for node in nodes:
        least = floor(node.cost, device, dtype, link)
        work, moved = quantity(node.cost.flops), quantity(node.cost.bytes)
        figures = f"{work}FLOP · {moved}B · floor {duration(least.seconds)}"
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
            )
        )
    return found


def _label(node: NodeCost) -> str:
    """A node without a part of the model of its own goes by its operation."""
    part = node.module.rpartition(".")[2]
    label = part if node.parameters or "+" in part else node.operation
    return label.replace("&", " & ").replace("+", " + ")
