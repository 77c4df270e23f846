"""Which tokens of a step each rank runs: all of them once, as many as the others, and as many pairs with keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from strata.cost.step_times import DivisionTimes, StepTimes
from strata.engine.plan import Chunk, Draw, PlanArrays, StepPlan
from strata.engine.ranks.token_division import TokenDivision, pieces_of

CASES: list[Any] = [[8192], [1, 1, 1, 700, 9, 4000], [1] * 40 + [64, 65, 8000], [511] * 8, [1023, 1024, 5]]


def plan_of(counts: list[int], starts: list[int]) -> StepPlan:
    chunks = []
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        draws = tuple(Draw(slot + other, slot + other) for other in range(slot % 3))  # samples of one prompt
        chunks.append(Chunk(slot, slot, start, count, draws, 0, ()))
    return StepPlan((), (), tuple(chunks), (), sum(counts))


@pytest.mark.parametrize("counts", CASES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_token_is_of_one_rank(counts: list[int], ranks: int) -> None:
    pieces = pieces_of(counts, ranks, 16)
    found = sorted((piece.chunk, piece.first, piece.first + piece.count) for own in pieces for piece in own)
    for chunk, count in enumerate(counts):
        own = [(first, end) for at, first, end in found if at == chunk]
        assert own[0][0] == 0
        assert own[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(own))
    for own in pieces:  # those that decode come first
        assert [piece.count != 1 for piece in own] == sorted(piece.count != 1 for piece in own)
    tokens = [sum(piece.count for piece in own) for own in pieces]
    assert max(tokens) - min(tokens) < 2 * ranks * 16 + 2 * len(counts)


@pytest.mark.parametrize("start", [0, 8192, 57344])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_as_many_pairs_of_queries_and_keys(start: int, ranks: int) -> None:
    pairs = [
        sum(piece.count * (2 * (start + piece.first) + piece.count + 1) // 2 for piece in own)
        for own in pieces_of([8192], ranks, 128)
    ]
    assert max(pairs) == min(pairs)


def test_a_rank_has_its_pieces_as_sequences_and_the_rows_of_all_draws() -> None:
    counts, starts = [1, 21, 6], [30, 8, 0]
    step = PlanArrays(plan_of(counts, starts))
    found = [TokenDivision(2, index, 4).divide(step) for index in range(2)]
    # The second chunk is cut at 5, 10 and 15; the third goes to the second rank, which has 10 tokens, then the first.
    assert found[0].slots.tolist() == [0, 1, 1]
    assert found[0].starts.tolist() == [30, 8, 23]
    assert found[0].counts.tolist() == [1, 5, 6]
    assert found[1].slots.tolist() == [1, 2]
    assert found[1].starts.tolist() == [13, 0]
    assert found[1].counts.tolist() == [10, 6]
    assert [one.tokens for one in found] == [12, 16]
    assert [one.rows for one in found] == [16, 16]
    assert [one.shape.sequences for one in found] == [4, 2]  # one for the padding of the first
    assert [one.ends.tolist() for one in found] == [[31, 13, 29], [23, 6]]
    for one in found:
        assert one.drawn == [1, 2, 3]
        assert one.draw_lengths.tolist() == [29, 6, 6]
        assert one.draw_ranks.tolist() == [0, 1, 1]
        assert one.room == (16, 3, 3, 2)
        assert [share.counts.tolist() for share in one.shares] == [[1, 5, 6], [10, 6]]
    assert found[0].draw_rows.tolist() == [11, 0, 0]
    assert found[1].draw_rows.tolist() == [0, 15, 15]


@pytest.mark.parametrize("counts", CASES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_no_share_needs_more_room_than_the_largest(counts: list[int], ranks: int) -> None:
    division = TokenDivision(ranks, 0, 16)
    largest = division.largest(sum(counts), len(counts))
    step = division.divide(PlanArrays(plan_of(counts, [0] * len(counts))))
    assert step.shape.tokens <= largest.tokens
    assert step.shape.sequences <= largest.sequences
    assert step.shape.size <= largest.size


def pays(division: TokenDivision, counts: list[int], start: int = 0, *, recorded: bool = False) -> bool:
    step = PlanArrays(plan_of(counts, [start] * len(counts)))
    share = division.share(step)
    return share is not None and division.pays(step, share, recorded=recorded)


def test_a_step_is_divided_if_that_takes_less_time() -> None:
    # Of the step, weights, product of a token, token, sequence, key, pair, and of launches beyond 1,024 tokens.
    times = StepTimes(1e-3, 4e-3, 20e-6, 0.0, 0.0, 0.0, 1e-9, recorded=1024, launch=30e-3)
    division = TokenDivision(2, 0, 128, replace(times, division=DivisionTimes(2, 512, 1e-3, 0.1e-6)))
    assert not pays(division, [511], recorded=True)
    assert pays(division, [512], recorded=True)  # 11.2 ms, 7.1 ms
    assert not pays(division, [1024])  # 21.5 ms recorded, 30 ms launched
    assert pays(division, [1024], recorded=True)  # 12 ms
    assert pays(division, [1024], 20_000)  # 42 ms, 23 ms and messages
    assert pays(division, [2048])
    slow = TokenDivision(2, 0, 128, replace(times, division=DivisionTimes(2, 512, message=1.0, token=0.0)))
    assert not pays(slow, [2048], recorded=True)


def test_a_chunk_that_is_not_cut_makes_the_step_of_its_rank_as_long() -> None:
    # By products alone: 511 and 33 tokens leave one rank with 511, 480 and 481 with 481 of 961.
    times = StepTimes(0.0, 0.0, 20e-6, 0.0, 0.0, 0.0, 0.0, recorded=8192)
    division = TokenDivision(2, 0, 128, replace(times, division=DivisionTimes(2, 512, 1e-3, 0.0)))
    assert not pays(division, [511, 33], recorded=True)
    assert pays(division, [480, 481], recorded=True)
    # By what else a token costs, of which the rank with 992 of 1,024 tokens has most.
    times = StepTimes(0.0, 0.0, 0.0, 20e-6, 0.0, 0.0, 0.0, recorded=8192)
    four = TokenDivision(4, 0, 128, replace(times, division=DivisionTimes(4, 1024, 1e-3, 0.0)))
    assert not pays(four, [992, *(1,) * 32], recorded=True)
    assert pays(four, [1024], recorded=True)
    without = TokenDivision(2, 0, 4)
    assert not pays(without, [15, 1])
    assert not pays(without, [15, 2, 3])  # 15 of 20, where 10 would be even
    assert pays(without, [15, 14])
    assert pays(without, [40])


def test_ranks_that_expect_different_times_divide_the_same_steps() -> None:
    times = StepTimes(1e-3, 4e-3, 20e-6, 3e-8, 2e-7, 1e-9, 1e-9, recorded=1024, launch=30e-3)
    mine = TokenDivision(2, 0, 128, replace(times, division=DivisionTimes(2, 1024, 1e-3, 0.1e-6, 4096)))
    expected = replace(times, weights=5e-3, pair=7e-10, division=DivisionTimes(2, 1024, 2e-3, 0.1e-6, 4096))
    other = TokenDivision(2, 1, 128, expected)
    told: list[list[int]] = [[], []]
    for division, numbers in zip((mine, other), told, strict=True):
        division.agreed(lambda number, numbers=numbers: numbers.append(number) or number)  # type: ignore[misc]
    agreed = []
    for division in (mine, other):
        numbers = iter(map(min, *told))
        agreed.append(division.agreed(lambda _, numbers=numbers: next(numbers)))  # type: ignore[misc]
    assert agreed[0].times == agreed[1].times
    found = agreed[0].times
    assert found is not None
    assert found.division is not None
    assert (found.weights, found.pair, found.division.message) == pytest.approx((4e-3, 7e-10, 1e-3))
    assert (found.recorded, found.division.ranks, found.division.recorded) == (1024, 2, 4096)
    assert [one.index for one in agreed] == [0, 1]


def test_decodes_are_not_divided() -> None:
    chunks = tuple(Chunk(slot, slot, 9, 1, (Draw(slot, slot),), 0, ()) for slot in range(64))
    step = PlanArrays(StepPlan((), (), chunks, (), 64))
    assert step.are_decodes
    assert TokenDivision.on("cpu", 2, 0).share(step) is None
    assert np.all(step.counts == 1)
