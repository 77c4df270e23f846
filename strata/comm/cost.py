"""What a collective costs: messages and bytes of each rank; `strata.hardware.links` has the time that they take.

The counts are those of ring algorithms (Thakur, Rabenseifner and Gropp 2005), which send the fewest bytes, but
for those of other algorithms, by their name.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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


def flagged_cost(nbytes: int, ranks: int) -> CollectiveCost:
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
