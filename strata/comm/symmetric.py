"""Memory of the GPUs of an axis that each of them can write, so that kernels exchange messages without a library."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from strata.comm.collectives import all_gather_json
from strata.comm.launch import WITHOUT_MULTICAST
from strata.comm.mesh import Axis
from strata.kernels.collective.all_reduce import PACKETS, PROGRAMS, TWO_SHOT_WORDS
from strata.kernels.collective.one_shot_flags import FLAG_PROGRAMS, FLAG_WORDS
from strata.kernels.triton_import import HAS_TRITON

# For how many ranks there are kernels: powers of two, as many as a machine has.
SIZES = (2, 4, 8)


@dataclass(frozen=True)
class SymmetricMemory:
    """What the kernels of `strata.kernels.collective.all_reduce` need of one rank.

    inbox: [words] int32, where the others write. peers: [ranks] int64, the addresses of all inboxes. counters:
    [3, FLAG_PROGRAMS] int32, the calls of each program so far: in one shot, in two, and in one with flags. handle:
    keeps the others' memory.

    The ranks call the kernels in the same order, each on one stream.
    """

    inbox: Tensor
    peers: Tensor
    counters: Tensor
    handle: Any = field(repr=False)

    @property
    def ranks(self) -> int:
        return len(self.peers)


@dataclass(frozen=True)
class InboxLayout:
    """Where the parts of an inbox begin, in words: packets, which are first; numbers of both of two shots, and their
    flags; numbers and flags of one shot without packets; its end."""

    first: int
    second: int
    flags: int
    flagged: int
    flags_behind: int
    end: int

    @staticmethod
    def of(ranks: int) -> InboxLayout:
        # A packet has two words, and each region there is twice.
        first = 2 * 2 * PROGRAMS * ranks * PACKETS
        second = first + 2 * TWO_SHOT_WORDS
        flags = second + 2 * TWO_SHOT_WORDS
        flagged = flags + 2 * PROGRAMS * ranks
        flags_behind = flagged + 2 * ranks * FLAG_WORDS
        return InboxLayout(first, second, flags, flagged, flags_behind, flags_behind + FLAG_PROGRAMS * ranks)


def with_symmetric_memory(axis: Axis, device: torch.device) -> Axis:
    """The axis with symmetric memory, if all its ranks are GPUs of one machine that reach each other's; else as it is,
    and a line in the log says why. All ranks call it together. device: this rank's.
    """
    reason, memory = _why_not(axis, device), None
    if reason is None:
        failure = None
        try:
            memory = _exchanged(axis, device)
        except RuntimeError as error:  # a system may forbid it
            failure = str(error).partition("\n")[0]
        # Nobody writes before all have cleared, and all do or none.
        reason = next(filter(None, all_gather_json(failure, axis, device)), None)
    if reason is None:
        return replace(axis, symmetric=memory)
    if axis.size > 1 and axis.index == 0:
        logging.getLogger("strata.comm").warning("messages along %s go by the library alone: %s", axis.name, reason)
    return axis


def imagined(name: str, ranks: int) -> Axis:
    """The first rank's axis of so many GPUs that are not there, with symmetric memory where there are kernels for it:
    for graphs that are costed, shown or compiled, and not run.
    """
    memory = None
    if HAS_TRITON and ranks in SIZES:
        words = torch.empty(InboxLayout.of(ranks).end, dtype=torch.int32, device="meta")
        peers = torch.empty(ranks, dtype=torch.int64, device="meta")
        memory = SymmetricMemory(words, peers, words.new_empty(3, FLAG_PROGRAMS), None)
    return Axis(name, ranks, 0, tuple(range(ranks)), None, symmetric=memory)


def _why_not(axis: Axis, device: torch.device) -> str | None:
    """The same on all ranks: what one finds, all are told."""
    if axis.group is None:
        return "it has one rank"
    own = None
    if device.type != "cuda" or not HAS_TRITON:
        own = "it needs CUDA and Triton"
    elif axis.size not in SIZES:
        own = f"there are kernels for {', '.join(map(str, SIZES))} ranks, not {axis.size}"
    elif apart := [
        other
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other)
    ]:
        own = f"GPU {device.index} cannot reach the memory of GPU {apart[0]}"
    told = all_gather_json([own, socket.gethostname()], axis, device)
    if len({host for _, host in told}) > 1:
        return "its ranks are on several machines"
    return next((reason for reason, _ in told if reason is not None), None)


def _exchanged(axis: Axis, device: torch.device) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as symmetric

    os.environ.update(WITHOUT_MULTICAST)  # which none of these kernels uses
    inbox = symmetric.empty(InboxLayout.of(axis.size).end, dtype=torch.int32, device=device)
    assert axis.group is not None
    handle = symmetric.rendezvous(inbox, axis.group)
    inbox.zero_()
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counters = torch.zeros(3, FLAG_PROGRAMS, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return SymmetricMemory(inbox, peers, counters, handle)
