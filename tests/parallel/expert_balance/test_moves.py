"""Experts that move between slots: what each slot holds afterwards, and who sends it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.parallel.expert_balance import moves as expert_moves
from strata.parallel.expert_balance.moves import move_experts, moves
from strata.parallel.expert_balance.placement import place_experts
from tests.parallel.ranks import run_ranks


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
