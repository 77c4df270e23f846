"""Runs of boxes against plain indexing, for random shapes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata.train.checkpoints.regions import Box, Run, copy_common


def flat_places(shape: tuple[int, ...], run: Run) -> Tensor:
    """Which elements of the flattened tensor a run covers, in its order."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = numbers[tuple(slice(first, end) for first, end in run.box)].flatten()
    return inside[run.start : run.start + run.elements]


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], Run, Run]:
    """A shape and two runs of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def run() -> Run:
        edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        box: Box = tuple((first, end) for first, end in edges)
        size = math.prod(end - first for first, end in box)
        first, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        return Run(box, first, end - first)

    return shape, run(), run()


@settings(max_examples=300, deadline=None)
@given(runs())
def test_what_two_runs_share_is_copied_and_nothing_else(drawn: tuple[tuple[int, ...], Run, Run]) -> None:
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


def test_a_run_is_few_rectangles() -> None:
    assert len(Run(((0, 128), (0, 64)), 10, 5000).rectangles) == 3
    assert len(Run(((3, 8),), 1, 3).rectangles) == 1
    assert Run(((2, 4), (5, 9)), 0, 8).rectangles[0].box == ((2, 4), (5, 9))
