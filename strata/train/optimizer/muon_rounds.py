"""Which rank orthogonalizes which matrices, and what travels to it and back: counted once, from who holds what.

Ranks divide parameters in any way: flat parts of buckets, rows, shards of the tensor axis, or each rank holds
everything. Every rank computes the same rounds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from strata.train.optimizer.orthogonalize import orthogonalization_flops

_IN_LAYER = re.compile(r"model\.layers\.\d+\.")
# Elements that a rank orthogonalizes at once, unless a matrix has more.
BATCH_ELEMENTS = 1 << 26


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon changes the parameter; embedding, head, norms and biases are AdamW's."""
    return len(shape) > 1 and _IN_LAYER.match(name) is not None


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a parameter: elements `start` to `end` - 1 of its flattened shard.

    experts: which of the shards that hold different experts, each a parameter of its own. box: which of the shards that
    matrices were cut into, along dimension `cut` (None: not cut). shape: of the shard.
    """

    name: str
    experts: int
    box: int
    cut: int | None
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class StackShard:
    """A shard of a stack's rows or columns: first and end of each, and where it begins in the flattened shard."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    start: int

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class MatrixStack:
    """Matrices that lie one after another in a parameter; one rank, the owner, orthogonalizes them.

    shape: (rows, columns) of each. Boxes divide the matrix; that of several is one of count * rows rows.
    """

    name: str
    experts: int
    count: int
    shape: tuple[int, int]
    boxes: tuple[StackShard, ...]

    @property
    def elements(self) -> int:
        return self.count * prod(self.shape)

    @property
    def flops(self) -> int:
        return self.count * orthogonalization_flops(*self.shape)


@dataclass(frozen=True)
class MatrixTransfer:
    """Elements `start` to `end` - 1 of a flattened box go from one rank to another, or stay where both are the same."""

    source: int
    target: int
    stack: MatrixStack
    box: int
    start: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Round:
    """What all ranks do at once. batches: the stacks of each rank, of one shape, maybe none.

    gathered: the transfers to the owners; of an element that several ranks hold, one sends it. returned: those from the
    owners, to all that hold it. Both in one order on all ranks.
    """

    batches: tuple[tuple[MatrixStack, ...], ...]
    gathered: tuple[MatrixTransfer, ...]
    returned: tuple[MatrixTransfer, ...]


def make_rounds(holdings: Sequence[Sequence[Holding]], batch_elements: int = BATCH_ELEMENTS) -> list[Round]:
    """holdings: of each rank. Raises ValueError if ranks together do not hold all of a matrix."""
    stacks, holders = _stacks(holdings, batch_elements)
    batches = [_batches(owned, batch_elements) for owned in assign_owners(stacks, len(holdings))]
    rounds = []
    for number in range(max(map(len, batches))):
        now = tuple(own[number] if number < len(own) else () for own in batches)
        gathered, returned = [], []
        for owner, batch in enumerate(now):
            for stack in batch:
                for (box, start, end), ranks in _intervals(stack, holders[stack.name, stack.experts]).items():
                    nearest = min(ranks, key=lambda rank: (abs(rank - owner), rank))
                    gathered.append(MatrixTransfer(nearest, owner, stack, box, start, end))
                    returned += [MatrixTransfer(owner, rank, stack, box, start, end) for rank in ranks]
        rounds.append(Round(now, tuple(gathered), tuple(returned)))
    return rounds


def assign_owners(stacks: Iterable[MatrixStack], ranks: int) -> list[list[MatrixStack]]:
    """The stacks of each rank: the largest first, each to the rank with the least work (Graham 1969)."""
    owned: list[list[MatrixStack]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for stack in sorted(stacks, key=lambda stack: (-stack.flops, stack.shape)):
        least = work.index(min(work))
        owned[least].append(stack)
        work[least] += stack.flops
    return owned


def _batches(owned: Sequence[MatrixStack], most: int) -> list[tuple[MatrixStack, ...]]:
    """Neighbours of one shape together, as far as they have at most so many elements."""
    batches: list[list[MatrixStack]] = []
    for stack in owned:
        before = batches[-1] if batches else []
        if before and before[-1].shape == stack.shape and sum(one.elements for one in [*before, stack]) <= most:
            before.append(stack)
        else:
            batches.append([stack])
    return [tuple(batch) for batch in batches]


Holders = Mapping[int, Sequence[tuple[int, Holding]]]  # by box


def _stacks(
    holdings: Sequence[Sequence[Holding]], batch_elements: int
) -> tuple[list[MatrixStack], dict[tuple[str, int], Holders]]:
    """All stacks, and the ranks that hold something of each parameter."""
    found: dict[tuple[str, int], dict[int, list[tuple[int, Holding]]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(holdings):
        for holding in own:
            found[holding.name, holding.experts][holding.box].append((rank, holding))
    stacks: list[MatrixStack] = []
    for (name, _), boxes in sorted(found.items()):
        shards = [boxes[box][0][1] for box in sorted(boxes)]
        if [shard.box for shard in shards] != list(range(len(shards))):
            raise ValueError(f"the ranks do not hold all of {name}; its matrices cannot be orthogonalized")
        if len(shards[0].shape) == 2:
            stacks.append(_cut_matrix(shards))
        else:
            stacks += _stacked_matrices(shards[0], len(holdings), batch_elements)
    return stacks, {key: dict(boxes) for key, boxes in found.items()}


def _cut_matrix(shards: Sequence[Holding]) -> MatrixStack:
    """One matrix, whose shards follow each other along the dimension that was cut."""
    first = shards[0]
    boxes, place = [], 0
    for shard in shards:
        rows, columns = shard.shape
        if first.cut == 1:
            boxes.append(StackShard((0, rows), (place, place + columns), 0))
            place += columns
        else:
            boxes.append(StackShard((place, place + rows), (0, columns), 0))
            place += rows
    return MatrixStack(first.name, first.experts, 1, (boxes[-1].rows[1], boxes[-1].columns[1]), tuple(boxes))


def _stacked_matrices(shard: Holding, ranks: int, batch_elements: int) -> Iterator[MatrixStack]:
    """Matrices of experts, [experts, rows, columns], in as many stacks as keep all ranks at work."""
    count, rows, columns = shard.shape
    if shard.name.endswith("gate_up_proj"):  # the rows of two matrices (`strata.models.experts`)
        count, rows = 2 * count, rows // 2
    each = max(1, min(-(-count // ranks), batch_elements // (rows * columns)))
    for first in range(0, count, each):
        held = min(each, count - first)
        box = StackShard((0, held * rows), (0, columns), first * rows * columns)
        yield MatrixStack(shard.name, shard.experts, held, (rows, columns), (box,))


def _intervals(stack: MatrixStack, holders: Holders) -> dict[tuple[int, int, int], list[int]]:
    """The ranks that hold each slice (box, start, end) of a stack. Raises ValueError if slices overlap or
    miss."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, box in enumerate(stack.boxes):
        for rank, holding in holders[number]:
            start, end = max(holding.start - box.start, 0), min(holding.end - box.start, box.elements)
            if start < end:
                found[number, start, end].append(rank)
    slices = dict(sorted(found.items()))
    for number, box in enumerate(stack.boxes):
        bounds = [(start, end) for place, start, end in slices if place == number]
        if [0, *(end for _, end in bounds)] != [*(start for start, _ in bounds), box.elements]:
            raise ValueError(f"the ranks do not hold all of {stack.name} once; its matrices cannot be orthogonalized")
    return slices
