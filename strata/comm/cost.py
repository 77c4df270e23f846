"""What a collective costs: messages and bytes of each rank; `strata.hardware.links` has the time that they take.

The counts are those of ring algorithms (Thakur, Rabenseifner and Gropp 2005), which send the fewest bytes, but
for those of other algorithms, by their name.

How long collectives take between ranks of several machines: a fast link inside each, a slower one between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from strata.hardware.links import Link


@dataclass(frozen=True)
class CollectiveCost:
    """What one rank sends: how many messages, one after another, and bytes in all. It receives as much."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: CollectiveCost) -> CollectiveCost:
        return CollectiveCost(self.messages + other.messages, self.bytes + other.bytes)


def all_reduce_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """Of `nbytes` on each rank: a reduce-scatter and an all-gather."""
    return reduce_scatter_cost(nbytes, ranks) + all_gather_cost(nbytes, ranks)


def tree_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """An all-reduce up a tree and down again: two trees in which ranks change places have half of the bytes each, so
    that all links are as busy (Sanders, Speck and Traff 2009).
    """
    return CollectiveCost(2 * (ranks - 1).bit_length(), nbytes // ranks * (ranks - 1) * 2)


def one_shot_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """An all-reduce in which a rank sends all it has to each other, in packets that are twice as large."""
    return CollectiveCost(1, 2 * nbytes * (ranks - 1))


def flag_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """The same with a flag behind the bytes as they are."""
    return CollectiveCost(1, nbytes * (ranks - 1))


def two_shot_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """An all-reduce in which each rank adds up its part, and then sends that to each other."""
    return CollectiveCost(2, 2 * (nbytes // ranks) * (ranks - 1))


def all_gather_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """Of `nbytes` in the result: every part but one passes through each rank."""
    return CollectiveCost(ranks - 1, nbytes // ranks * (ranks - 1))


def reduce_scatter_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """Of `nbytes` of input on each rank."""
    return CollectiveCost(ranks - 1, nbytes // ranks * (ranks - 1))


def all_to_all_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """Of `nbytes` of input on each rank, in equal parts for all."""
    return CollectiveCost(ranks - 1, nbytes // ranks * (ranks - 1))


def shift_cost(nbytes: int, ranks: int) -> CollectiveCost:
    """Of `nbytes` on each rank, to the next one."""
    return CollectiveCost() if ranks == 1 else CollectiveCost(1, nbytes)


@dataclass(frozen=True)
class HierarchicalCost:
    """What one rank sends to others of its machine, and to its counterparts in other machines."""

    inside: CollectiveCost = field(default_factory=CollectiveCost)
    across: CollectiveCost = field(default_factory=CollectiveCost)

    def __add__(self, other: HierarchicalCost) -> HierarchicalCost:
        return HierarchicalCost(self.inside + other.inside, self.across + other.across)


def hierarchical_all_gather_cost(nbytes: int, inside: int, machines: int) -> HierarchicalCost:
    """Of `nbytes` in the result: first between machines, where a rank gathers its counterparts' parts alone, then
    inside each, between `inside` ranks.
    """
    return HierarchicalCost(all_gather_cost(nbytes, inside), all_gather_cost(nbytes // inside, machines))


def hierarchical_reduce_scatter_cost(nbytes: int, inside: int, machines: int) -> HierarchicalCost:
    """Of `nbytes` of input on each rank: the same the other way round."""
    return HierarchicalCost(reduce_scatter_cost(nbytes, inside), reduce_scatter_cost(nbytes // inside, machines))


def hierarchical_all_reduce_cost(nbytes: int, inside: int, machines: int) -> HierarchicalCost:
    """Of `nbytes` on each rank: a part of them is all that crosses to other machines (Thakur et al. 2005; NCCL's
    hierarchical algorithms).
    """
    return hierarchical_reduce_scatter_cost(nbytes, inside, machines) + hierarchical_all_gather_cost(
        nbytes, inside, machines
    )


def hierarchical_all_to_all_cost(nbytes: int, inside: int, machines: int) -> HierarchicalCost:
    """Of `nbytes` of input on each rank, in equal parts for all: what goes to another machine goes first to the rank
    here that has the place of its target there (PXN, NCCL 2.12), so that a rank sends to its counterparts alone.
    """
    return HierarchicalCost(all_to_all_cost(nbytes, inside), all_to_all_cost(nbytes, machines))


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
