"""How long collectives take between ranks of several machines: a fast link inside each, a slower one between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strata.comm.cost import (
    CollectiveCost,
    HierarchicalCost,
    hierarchical_all_gather_cost,
    hierarchical_all_reduce_cost,
    hierarchical_all_to_all_cost,
    hierarchical_reduce_scatter_cost,
    shift_cost,
)
from strata.hardware.links import Link


def _shift(nbytes: int, inside: int, machines: int) -> HierarchicalCost:
    """Of all ranks of a ring, those at the ends of a machine send to the next one, and the others wait for them."""
    cost = shift_cost(nbytes, inside * machines)
    return HierarchicalCost(cost) if machines == 1 else HierarchicalCost(across=cost)


COLLECTIVES: Mapping[str, Callable[[int, int, int], HierarchicalCost]] = {
    "all_gather": hierarchical_all_gather_cost,
    "reduce_scatter": hierarchical_reduce_scatter_cost,
    "all_reduce": hierarchical_all_reduce_cost,
    "all_to_all": hierarchical_all_to_all_cost,
    "shift": _shift,
}


@dataclass(frozen=True)
class Network:
    """link: between devices of a machine, of which each has `machine`. nic: from each device to other machines; None
    where all ranks lie in one machine.
    """

    link: Link
    machine: int
    nic: Link | None = None

    def divided(self, ranks: int, stride: int) -> tuple[int, int]:
        """Of ranks that are `stride` apart in the order of all: how many lie in one machine, and in how many.

        Raises ValueError if they lie in several and nothing is known of what joins these.
        """
        inside = max(1, min(ranks, self.machine // stride))
        machines = -(-ranks // inside)
        if machines > 1 and self.nic is None:
            raise ValueError(
                f"{ranks} ranks, {stride} apart, lie in {machines} machines of {self.machine} devices, and the link "
                f"between machines is not known; give its bandwidth, or fewer ranks"
            )
        return inside, machines

    def cost(self, collective: str, nbytes: int, ranks: int, stride: int = 1) -> HierarchicalCost:
        """What a rank sends in one of `COLLECTIVES` between so many ranks."""
        return COLLECTIVES[collective](nbytes, *self.divided(ranks, stride))

    def seconds(self, cost: HierarchicalCost, calls: int = 1, share: float = 1.0) -> float:
        """Of collectives that are sent in so many calls, one after another, at a share of the bandwidth."""
        found = _seconds(self.link, cost.inside, calls, share)
        return found if self.nic is None else found + _seconds(self.nic, cost.across, calls, share)


def _seconds(link: Link, cost: CollectiveCost, calls: int, share: float) -> float:
    if not cost.bytes:
        return 0.0
    return calls * (link.start + link.latency * cost.messages) + cost.bytes / (link.bandwidth * share)
