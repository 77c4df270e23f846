"""Which elements of a tensor a flat run of a box of it covers, as rectangles, and copies of what two ranges share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product

from torch import Tensor

Box = tuple[tuple[int, int], ...]  # along every dimension first and end


@dataclass(frozen=True)
class Rectangle:
    """Some elements of a tensor that lie one after another in a run, from the run's element `at` on."""

    box: Box
    at: int

    def values(self, run: Tensor) -> Tensor:
        """The view of the run's values, shaped as the rectangle."""
        sizes = _sizes(self.box)
        return run[self.at : self.at + math.prod(sizes)].view(sizes)

    def inside(self, box: Box) -> tuple[slice, ...]:
        """Where `box`, a part of this one, lies in `values`."""
        return tuple(
            slice(first - origin, end - origin) for (first, end), (origin, _) in zip(box, self.box, strict=True)
        )


@dataclass(frozen=True)
class FlatRange:
    """The elements `start` to `start + elements` - 1 of the flattened `box` of a tensor."""

    box: Box
    start: int
    elements: int

    @staticmethod
    def of_whole(shape: Sequence[int]) -> FlatRange:
        """All of a tensor."""
        return FlatRange(tuple((0, size) for size in shape), 0, math.prod(shape))

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """That make up the run, in its order: one in one dimension, at most two more with each further one."""
        found, at = [], 0
        for block in _blocks(_sizes(self.box), self.start, self.start + self.elements):
            placed = tuple(
                (origin + first, origin + end) for (first, end), (origin, _) in zip(block, self.box, strict=True)
            )
            found.append(Rectangle(placed, at))
            at += math.prod(_sizes(block))
        return tuple(found)

    def overlaps(self, other: FlatRange) -> bool:
        """Whether the two, ranges of one tensor, have an element in common."""
        pairs = product(self.rectangles, other.rectangles)
        return any(_common(one.box, another.box) is not None for one, another in pairs)


def are_disjoint(ranges: Sequence[FlatRange]) -> bool:
    """Whether no element of a tensor lies in two of the ranges."""
    by_box: dict[Box, list[FlatRange]] = {}
    for run in filter(lambda run: run.elements, ranges):
        by_box.setdefault(run.box, []).append(run)
    # Runs of one box, as many as there are ranks, are compared with their neighbours alone.
    for alike in by_box.values():
        alike.sort(key=lambda run: run.start)
        if any(one.start + one.elements > other.start for one, other in pairwise(alike)):
            return False
    crossing = (pair for pair in combinations(by_box, 2) if _common(*pair) is not None)
    return not any(one.overlaps(other) for a, b in crossing for one, other in product(by_box[a], by_box[b]))


def copy_common(source: FlatRange, values: Tensor, target: FlatRange, out: Tensor) -> int:
    """Copy what two ranges of one tensor have in common. Returns how many elements that is.

    values: [source.elements]. out: [target.elements], changed in place; its dtype may differ.
    """
    copied = 0
    for one, another in product(source.rectangles, target.rectangles):
        if (box := _common(one.box, another.box)) is not None:
            another.values(out)[another.inside(box)] = one.values(values)[one.inside(box)]
            copied += math.prod(_sizes(box))
    return copied


def _sizes(box: Box) -> list[int]:
    return [end - first for first, end in box]


def _common(one: Box, another: Box) -> Box | None:
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, another, strict=True))
    return box if all(first < end for first, end in box) else None


def _blocks(sizes: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """The elements `first` to `end` - 1 of a flattened array as rectangles: the end of a row, whole rows, the
    beginning of a row.
    """
    if first >= end:
        return
    if not sizes:
        yield ()
        return
    row = math.prod(sizes[1:])
    top, skipped = divmod(first, row)
    if skipped:
        stop = min(end, (top + 1) * row)
        for block in _blocks(sizes[1:], skipped, stop - top * row):
            yield ((top, top + 1), *block)
        first, top = stop, top + 1
    bottom = end // row
    if first < bottom * row:
        yield ((top, bottom), *((0, size) for size in sizes[1:]))
        first = bottom * row
    if first < end:
        for block in _blocks(sizes[1:], 0, end - first):
            yield ((bottom, bottom + 1), *block)
