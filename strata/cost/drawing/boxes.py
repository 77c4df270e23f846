"""The boxes of a drawing: kernels with what they cost and the least time that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.cost.draw import duration, quantity, share
from strata.cost.nodes import NodeCost
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import Floor, floor


@dataclass(frozen=True)
class Box:
    """One node. least: its floor. took: seconds that were measured; None: nobody looked."""

    node: NodeCost
    least: Floor
    took: float | None = None

    @property
    def seconds(self) -> float:
        """Of the floor."""
        return self.least.seconds

    @property
    def bound(self) -> str:
        """What sets the floor."""
        return self.least.bound if self.least.seconds else ""

    @property
    def label(self) -> str:
        """Of the modules whose work it does, & between merged and + between fused ones; a node without a part of the
        model of its own goes by its operation."""
        part = self.node.module.rpartition(".")[2]
        label = part if self.node.parameters or "+" in part else self.node.operation
        return label.replace("&", " & ").replace("+", " + ")

    @property
    def by(self) -> tuple[str, ...]:
        """What runs it, and the kernels of that."""
        return (self.node.implementation, *self.node.kernels) if self.node.implementation else ()

    @property
    def figures(self) -> str:
        work, moved = quantity(self.node.cost.flops), quantity(self.node.cost.bytes)
        figures = f"{work}FLOP · {moved}B · floor {duration(self.seconds)}"
        if self.took is None:
            return figures
        near = share(self.seconds, self.took)
        return figures + f" · took {duration(self.took)}" + f" ({near})" * bool(near)


def boxes(
    nodes: Sequence[NodeCost],
    device: Device,
    dtype: str,
    link: Link | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[Box]:
    """In the order of the nodes. measured: seconds of each, by its name."""
    return [Box(node, floor(node.cost, device, dtype, link), (measured or {}).get(node.name)) for node in nodes]
