"""Weights of experts move between the slots of ranks when a layer's placement changes, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.comm.collectives import Transfer, start_transfers
from strata.comm.mesh import Axis
from strata.parallel.expert_balance.placement import Numbers

# What a move holds beside the weights, about.
_STAGED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Move:
    """The expert in slot `source` goes into slot `target`, too."""

    source: int
    target: int


def moves(current: Numbers, placed: Numbers, ranks: int) -> list[Move]:
    """What has to be copied so that the slots hold `placed` instead of `current`: both [slots], the expert in each.

    From the rank itself where it has the expert, else from the rank that has sent least. The same on every rank.
    """
    room = len(current) // ranks
    sent: Counter[int] = Counter()
    found = []
    for target in (placed != current).nonzero()[0].tolist():
        sources: list[int] = (current == placed[target]).nonzero()[0].tolist()
        source = min(sources, key=lambda slot: (slot // room != target // room, sent[slot // room], slot))
        if source // room != target // room:
            sent[source // room] += 1
        found.append(Move(source, target))
    return found


@torch.no_grad()
def move_experts(parameters: Sequence[Tensor], current: Numbers, placed: Numbers, axis: Axis) -> None:
    """Copy a layer's experts so that the slots hold `placed` instead of `current`. All ranks of the axis call it.

    parameters: of this rank, [its slots, rows, columns] each, contiguous. On a GPU the host does not wait. Memory: the
    experts that arrive, some of their rows at a time.
    """
    room = len(current) // axis.size
    wanted = [
        move for move in moves(current, placed, axis.size) if axis.index in (move.source // room, move.target // room)
    ]
    for parameter in parameters:
        # At most all of a rank's slots change; every rank has to send in the same pieces.
        step = max(1, _STAGED_BYTES // (room * parameter[0, 0].nbytes))
        for first in range(0, parameter.shape[1], step):
            _move_rows(parameter[:, first : first + step], wanted, room, axis)


def _move_rows(rows: Tensor, wanted: Sequence[Move], room: int, axis: Axis) -> None:
    """rows: of every slot of this rank, [its slots, rows, columns]."""
    arrived: list[tuple[int, Tensor]] = []
    transfers = []
    for move in wanted:
        source, target = move.source // room, move.target // room
        if source == target:
            arrived.append((move.target % room, rows[move.source % room].clone()))
        elif source == axis.index:
            transfers.append(Transfer(rows[move.source % room], source, target))
        else:
            staged = torch.empty_like(rows[0])
            transfers.append(Transfer(staged, source, target))
            arrived.append((move.target % room, staged))
    if transfers:
        start_transfers(transfers, axis).wait()
    # What goes out has gone: now slots may change.
    for slot, value in arrived:
        rows[slot].copy_(value)
