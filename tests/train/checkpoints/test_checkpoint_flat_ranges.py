"""Runs of boxes, and tables of them, against plain indexing, for random shapes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata.train.checkpoints.flat_ranges import Box, FlatRange, are_disjoint, copy_common
from strata.train.checkpoints.index import Index, StoredShard


def flat_places(shape: tuple[int, ...], run: FlatRange) -> Tensor:
    """Which elements of the flattened tensor a run covers, in its order."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = numbers[tuple(slice(first, end) for first, end in run.box)].flatten()
    return inside[run.start : run.start + run.elements]


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], FlatRange, FlatRange]:
    """A shape and two runs of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def run() -> FlatRange:
        edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        box: Box = tuple((first, end) for first, end in edges)
        size = math.prod(end - first for first, end in box)
        first, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        return FlatRange(box, first, end - first)

    return shape, run(), run()


@settings(max_examples=300, deadline=None)
@given(runs())
def test_what_two_runs_share_is_copied_and_nothing_else(drawn: tuple[tuple[int, ...], FlatRange, FlatRange]) -> None:
    shape, source, target = drawn
    values = torch.randn(math.prod(shape), dtype=torch.float64)
    have, want = flat_places(shape, source), flat_places(shape, target)
    out = torch.full((target.elements,), float("nan"), dtype=torch.float64)
    copied = copy_common(source, values[have], target, out)
    shared = torch.isin(want, have)
    assert copied == int(shared.sum())
    assert source.overlaps(target) == (copied > 0)
    assert torch.equal(out[shared], values[want][shared])
    assert out[~shared].isnan().all()


def test_an_empty_run_between_two_hides_no_overlap() -> None:
    assert not are_disjoint([FlatRange(((0, 9),), *one) for one in ((0, 5), (2, 0), (3, 2))])
    assert are_disjoint([FlatRange(((0, 9),), *one) for one in ((0, 5), (2, 0), (5, 2))])


def test_a_run_is_few_rectangles() -> None:
    assert len(FlatRange(((0, 128), (0, 64)), 10, 5000).rectangles) == 3
    assert len(FlatRange(((3, 8),), 1, 3).rectangles) == 1
    assert FlatRange(((2, 4), (5, 9)), 0, 8).rectangles[0].box == ((2, 4), (5, 9))


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, ...], list[FlatRange]]:
    """A shape and runs that make up the whole, of which some may then be moved: the sum of their elements remains."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))}) for size in shape]
    boxes = itertools.product(*(itertools.pairwise(edges) for edges in cuts))
    runs: list[FlatRange] = []
    for box in boxes:
        size = math.prod(end - first for first, end in box)
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        runs += [FlatRange(box, first, end - first) for first, end in itertools.pairwise(edges)]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(runs) - 1))
        whole = tuple((0, size) for size in shape)
        last = math.prod(shape) - runs[at].elements
        runs[at] = FlatRange(whole, draw(st.integers(0, last)), runs[at].elements)
    return shape, draw(st.permutations(runs))


@settings(max_examples=300, deadline=None)
@given(tables())
def test_a_table_is_good_if_every_element_lies_in_one_shard(drawn: tuple[tuple[int, ...], list[FlatRange]]) -> None:
    shape, runs = drawn
    covered = torch.zeros(math.prod(shape), dtype=torch.int64)
    for run in runs:
        covered[flat_places(shape, run)] += 1
    shards = [StoredShard("a", "master", "w", shape, one.box, one.start, one.elements, "float32", 0) for one in runs]
    index = Index({}, 0, shards)
    if (covered == 1).all():
        index.check()
    else:
        with pytest.raises(ValueError, match="two shards of master/w overlap"):
            index.check()
