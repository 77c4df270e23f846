"""Transfers between ranks arrive, and both ends of each tell of it as the same one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.observer import CollectiveCall
from strata.comm.transfers import Transfer, start_transfers
from tests.parallel.ranks import run_ranks


class Noted:
    """An observer that counts calls by who they are between, and notes those that were waited for."""

    def __init__(self) -> None:
        self.begun: list[CollectiveCall] = []
        self.awaited: list[CollectiveCall | None] = []

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        number = 1 + sum(call.ranks == ranks for call in self.begun)
        self.begun.append(CollectiveCall(operation, axis, ranks, number, nbytes))
        return self.begun[-1]

    def waits(self, call: CollectiveCall | None) -> None:
        self.awaited.append(call)


def around(world: World, folder: Path) -> dict[str, Any]:
    """Twice to the next rank of a ring, in one message each time, then back once from 1 to 0."""
    noted = Noted()
    axis = Mesh.of(dataclasses.replace(world, observer=noted), {"pp": world.size}).axis("pp")
    next_, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    got = []
    for turn in range(2):
        out = torch.full((3,), 10.0 * turn + axis.index)
        arrives = torch.empty(3)
        start_transfers([Transfer(out, axis.index, next_), Transfer(arrives, before, axis.index)], axis).wait()
        got.append(arrives.tolist())
    if axis.index < 2:
        tensor = torch.full((5,), float(axis.index))
        start_transfers([Transfer(tensor, 1, 0)], axis).wait()
        got.append(tensor.tolist())
    assert noted.awaited[-1] is None
    return {"got": got, "calls": [call for call in noted.begun if call.operation == "transfer"]}


def test_transfers_arrive_and_are_told_of_alike(tmp_path: Path) -> None:
    found = run_ranks(around, 3, tmp_path)
    for rank, one in enumerate(found):
        before = (rank - 1) % 3
        assert one["got"][:2] == [[before] * 3, [10 + before] * 3]
    assert found[0]["got"][2] == found[1]["got"][2] == [1.0] * 5
    # Each of the 3 links twice and one the other way once, told by both of its ends with the same number and size.
    told = sorted(str(call) for one in found for call in one["calls"])
    assert len(told) == 14
    assert told[::2] == told[1::2]
    assert len(set(told)) == 7
