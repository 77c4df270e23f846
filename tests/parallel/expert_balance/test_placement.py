"""Placement of experts by load: what holds for any loads, and how near it comes to the best of all placements."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.kernels.moe.experts import experts as whole_experts
from strata.kernels.moe.experts import local_experts
from strata.parallel.expert_balance import moves as expert_moves
from strata.parallel.expert_balance.moves import move_experts, moves
from strata.parallel.expert_balance.placement import PERIOD, place_experts, rank_loads, rebalanced, turns
from tests.parallel.ranks import run_ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Loads, slots and ranks."""
    ranks = draw(st.integers(1, 6))
    count = draw(st.integers(1, 24))
    least = -(-count // ranks)
    room = draw(st.integers(least, min(count, least + 3)))
    load = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6))
    return draw(st.lists(load, min_size=count, max_size=count)), room * ranks, ranks


@given(cases())
def test_slots_are_filled_and_every_expert_has_a_copy(case: tuple[list[float], int, int]) -> None:
    loads, slots, ranks = case
    placement = place_experts(loads, slots, ranks)
    copies = np.bincount(placement, minlength=len(loads))
    assert placement.shape == (slots,)
    assert len(copies) == len(loads)
    assert copies.min() >= 1
    assert copies.max() <= ranks
    assert np.isclose(rank_loads(placement, loads, ranks).sum(), sum(loads))


@given(cases())
def test_the_heaviest_have_the_copies(case: tuple[list[float], int, int]) -> None:
    loads, slots, ranks = case
    copies = np.bincount(place_experts(loads, slots, ranks), minlength=len(loads))
    borne = np.array(loads) / copies
    # Whoever got another copy bore at least as much before as each of the others, that may have one more, bears now.
    for expert in np.flatnonzero(copies > 1):
        assert loads[expert] / (copies[expert] - 1) >= borne[copies < ranks].max(initial=0) - 1e-9


def best_possible(loads: list[float], slots: int, ranks: int) -> float:
    """The least load of the heaviest rank, of all numbers of copies and all ways to pack them."""
    best = float("inf")

    def pack(items: list[float], totals: tuple[float, ...], room: tuple[int, ...]) -> None:
        nonlocal best
        if max(totals) >= best:
            return
        if not items:
            best = max(totals)
            return
        for total, left in set(zip(totals, room, strict=True)):
            if left:
                rank = list(zip(totals, room, strict=True)).index((total, left))
                more = (*totals[:rank], total + items[0], *totals[rank + 1 :])
                pack(items[1:], more, (*room[:rank], left - 1, *room[rank + 1 :]))

    for extra in combinations_with_replacement(range(len(loads)), slots - len(loads)):
        copies = [1 + extra.count(expert) for expert in range(len(loads))]
        if max(copies) <= ranks:
            shares = [load / number for load, number in zip(loads, copies, strict=True) for _ in range(number)]
            pack(sorted(shares, reverse=True), (0.0,) * ranks, (slots // ranks,) * ranks)
    return best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_heaviest_rank_is_near_the_best_of_all_placements(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(ranks, 6))
    slots = min(-(-count // ranks) * ranks + data.draw(st.sampled_from([0, ranks])), count * ranks)
    loads = data.draw(st.lists(st.integers(0, 100).map(float), min_size=count, max_size=count))
    found = rank_loads(place_experts(loads, slots, ranks), loads, ranks).max()
    assert found <= 1.5 * best_possible(loads, slots, ranks)


def test_a_skewed_load_becomes_even() -> None:
    loads = 1 / np.arange(1, 65) ** 1.1
    contiguous = rank_loads(np.arange(64), loads, 8)
    placed = rank_loads(place_experts(loads, 80, 8), loads, 8)
    assert contiguous.max() > 4 * contiguous.mean()
    assert placed.max() < 1.05 * placed.mean()


def test_groups_stay_on_one_node() -> None:
    loads = np.random.default_rng(0).random(32) ** 3
    placement = place_experts(loads, 40, 8, groups=8, nodes=2)
    nodes = [set((node // 4).tolist()) for node in placement.reshape(2, -1)]
    assert nodes[0] & nodes[1] == set()
    assert sorted(nodes[0] | nodes[1]) == list(range(8))
    assert len(nodes[0]) == len(nodes[1])
    assert set(placement.tolist()) == set(range(32))
    with pytest.raises(ValueError, match="accepted are 32 to 128"):
        place_experts(loads, 160, 8, groups=8, nodes=2)
    # Where nodes cannot have equal numbers of groups, copies go anywhere.
    assert np.array_equal(place_experts(loads, 40, 8, groups=1, nodes=2), place_experts(loads, 40, 8))


def test_weights_are_moved_only_where_it_pays() -> None:
    even = np.ones(16)
    contiguous = np.arange(16)
    assert rebalanced(contiguous, place_experts(even, 16, 4), even, 4, 0.05) is contiguous
    skewed = np.where(contiguous < 4, 10.0, 1.0)
    placed = place_experts(skewed, 16, 4)
    moved = rebalanced(contiguous, placed, skewed, 4, 0.05)
    assert np.array_equal(np.sort(moved.reshape(4, -1)), np.sort(placed.reshape(4, -1)))
    assert (moved == contiguous).sum() >= 4  # each rank keeps one of the heavy ones or an own one where it is
    again = rebalanced(moved, place_experts(skewed, 16, 4), skewed, 4, 0.05)
    assert again is moved


@given(cases())
def test_experts_that_a_rank_keeps_stay_in_their_slots(case: tuple[list[float], int, int]) -> None:
    loads, slots, ranks = case
    placed = place_experts(loads, slots, ranks)
    current = place_experts(loads[::-1], slots, ranks)
    moved = rebalanced(current, placed, loads, ranks, 0.0)
    if moved is current:
        assert rank_loads(placed, loads, ranks).max() >= rank_loads(current, loads, ranks).max()
        return
    for old, new, wanted in zip(*(one.reshape(ranks, -1) for one in (current, moved, placed)), strict=True):
        assert sorted(new) == sorted(wanted)
        for expert in set(old) & set(new):
            kept = ((old == expert) & (new == expert)).sum()
            assert kept == min((old == expert).sum(), (new == expert).sum())


@given(cases())
def test_copies_take_turns(case: tuple[list[float], int, int]) -> None:
    loads, slots, ranks = case
    placement = place_experts(loads, slots, ranks)
    table = turns(placement, len(loads))
    assert (table.shape, table.dtype) == ((len(loads), PERIOD), np.int32)
    for expert, row in enumerate(table):
        assert set(placement[row].tolist()) == {expert}
        times = np.bincount(row, minlength=slots)[placement == expert]
        assert times.max() - times.min() <= 1


def test_ranks_add_up_to_the_whole() -> None:
    loads, ranks, slots = [9.0, 1, 1, 1, 5, 1], 4, 8
    placement = place_experts(loads, slots, ranks)
    table = torch.from_numpy(turns(placement, 6))
    x, weights = torch.randn(21, 16), torch.rand(21, 2)
    chosen = torch.rand(21, 6).argsort(1)[:, :2].contiguous()
    gate_up, down = torch.randn(6, 16, 16), torch.randn(6, 16, 8)
    total = torch.zeros_like(x)
    for rank, own in enumerate(torch.from_numpy(placement).view(ranks, -1)):
        total += local_experts(x, weights, chosen, gate_up[own], down[own], 2 * rank, slots, table)
    torch.testing.assert_close(total, whole_experts(x, weights, chosen, gate_up, down), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 3, 1, 1), "ranks = 3 does not divide slots = 4"),
        ((4, 2, 3, 1), "groups = 3 does not divide experts = 4"),
        ((4, 2, 2, 3), "nodes = 3 does not divide ranks = 2"),
        ((2, 2, 1, 1), "slots = 2 for 4 experts on 2 ranks; accepted are 4 to 8"),
        ((10, 2, 1, 1), "slots = 10 for 4 experts on 2 ranks; accepted are 4 to 8"),
        ((4, 0, 1, 1), "ranks = 0 does not divide"),
    ],
)
def test_numbers_that_do_not_fit(numbers: tuple[int, int, int, int], message: str) -> None:
    slots, ranks, groups, nodes = numbers
    with pytest.raises(ValueError, match=message):
        place_experts([1.0] * 4, slots, ranks, groups, nodes)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 8, 2), (6, 9, 3), (8, 16, 4), (3, 3, 1)]))
def test_moves_bring_every_expert_to_its_slot(seed: int, sizes: tuple[int, int, int]) -> None:
    count, slots, ranks = sizes
    random = np.random.default_rng(seed)
    current, placed = (place_experts(random.random(count) ** 4, slots, ranks) for _ in range(2))
    after = current.copy()
    room = slots // ranks
    for move in moves(current, placed, ranks):
        after[move.target] = current[move.source]
        if move.source // room != move.target // room:  # nobody sends what the target's rank has
            own = current.reshape(ranks, -1)[move.target // room]
            assert placed[move.target] not in own
    assert np.array_equal(after, placed)
    assert moves(current, current, ranks) == []


def test_copies_are_sent_in_turns() -> None:
    current = np.array([0, 1, 0, 1, 2, 3])
    placed = np.array([0, 1, 0, 1, 0, 1])
    assert {move.source // 2 for move in moves(current, placed, 3)} == {0, 1}


def moved(world: World, folder: Path) -> bool:
    """Whether all slots of this rank hold what they should after some placements, one after the other."""
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    expert_moves._STAGED_BYTES = 200  # several pieces
    random, slots, count = np.random.default_rng(1), 4 * world.size, 7
    whole = [torch.arange(count * 30.0).view(count, 6, 5), torch.arange(count * 15.0).view(count, 5, 3)]
    current = np.arange(slots) % count
    own = slice(4 * axis.index, 4 * axis.index + 4)
    parameters = [one[torch.from_numpy(current[own])].clone() for one in whole]
    right = True
    for _ in range(4):
        placed = place_experts(random.random(count) ** 4, slots, world.size)
        move_experts(parameters, current, placed, axis)
        current = placed
        pairs = zip(parameters, whole, strict=True)
        right &= all(torch.equal(part, one[torch.from_numpy(current[own])]) for part, one in pairs)
    return right


def test_weights_of_ranks_follow_the_placement(tmp_path: Path) -> None:
    assert run_ranks(moved, 3, tmp_path) == [True] * 3
