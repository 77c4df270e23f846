"""Sums of large messages over two GPUs by their copy engines, which leave all processors to the products beside them.

Each of two ranks copies what it has into memory of the other's (symmetric memory), and adds what it gets: as many bytes
each way as a reduce-scatter and an all-gather send, and a sum that is the same on both. Where kernels of the library
would hold some of the processors meanwhile, a product whose programs count on all of them waits for their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from strata.comm.collectives import all_gather_json
from strata.comm.mesh import Axis

# Each message begins and ends at addresses that suit any element.
_ALIGNED = 256


@dataclass(frozen=True)
class PeerCopies:
    """One rank's memory for messages from the other.

    inbox: [slots, bytes] uint8, where the other writes; outbox: the other's. Each slot has a signal that its message is
    there. stream: on which copies run.

    Nobody tells that a slot was read. The ranks begin and finish the same messages in the same order; so once a message
    is finished here, the other rank has begun with it, and has finished what stands before that. A slot is used again
    when a message has been finished here that was begun after the last one in the slot was finished.
    """

    inbox: Tensor
    outbox: Tensor
    peer: int
    stream: torch.cuda.Stream = field(repr=False)
    handle: Any = field(repr=False)

    @property
    def slots(self) -> int:
        return len(self.inbox)

    def start(self, x: Tensor, slot: int) -> PendingSum:
        """Send x, contiguous and of no more bytes than a slot, when the current stream has come so far. x must be left
        alone and kept until the end."""
        self.stream.wait_stream(torch.cuda.current_stream())
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            self.outbox[slot, : x.nbytes].copy_(x.view(-1).view(torch.uint8), non_blocking=True)
            self.handle.put_signal(self.peer, slot)
            arrived.record()
        return PendingSum(x, slot, self, arrived)


@dataclass(frozen=True)
class PendingSum:
    """A sum under way. result: x until then. sent: when this rank's part has been."""

    result: Tensor
    slot: int
    copies: PeerCopies = field(repr=False)
    sent: torch.cuda.Event = field(repr=False)

    @property
    def shape(self) -> torch.Size:
        """Of the result."""
        return self.result.shape

    def wait(self) -> Tensor:
        """The result, in the memory of x. The current stream waits, not the host."""
        return self.result.add_(self.received())

    def received(self) -> Tensor:
        """What the other rank has sent, like x, which may be written now. The current stream waits."""
        copies, x = self.copies, self.result
        torch.cuda.current_stream().wait_event(self.sent)
        # Not on the stream beside: a kernel that waits would find no processor free of products, or hold one.
        copies.handle.wait_signal(copies.peer, self.slot)
        return copies.inbox[self.slot, : x.nbytes].view(x.dtype).view(x.shape)


def with_peer_copies(axis: Axis, device: torch.device, slots: int, nbytes: int) -> Axis:
    """The axis with `slots` for messages of up to `nbytes`, if it has symmetric memory, two ranks, and memory for them;
    else as it is. All ranks call it together. device: this rank's.
    """
    if axis.symmetric is None or axis.size != 2 or nbytes == 0:
        return axis
    made, failure = None, None
    try:
        made = _made(axis, device, slots, -(-nbytes // _ALIGNED) * _ALIGNED)
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
    if any(all_gather_json(failure, axis, device)):
        return axis
    return replace(axis, copies=made)


def _made(axis: Axis, device: torch.device, slots: int, nbytes: int) -> PeerCopies:
    import torch.distributed._symmetric_memory as symmetric

    inbox = symmetric.empty(slots * nbytes, dtype=torch.uint8, device=device).view(slots, nbytes)
    assert axis.group is not None
    handle = symmetric.rendezvous(inbox, axis.group)
    peer = 1 - axis.index
    outbox = handle.get_buffer(peer, (slots, nbytes), torch.uint8)
    torch.cuda.synchronize(device)
    return PeerCopies(inbox, outbox, peer, torch.cuda.Stream(device, priority=-1), handle)


def fits(x: Tensor, axis: Any, slot: int) -> bool:
    """Whether an axis has such a slot."""
    copies = axis.copies if isinstance(axis, Axis) else None
    return copies is not None and slot < copies.slots and x.is_contiguous() and 0 < x.nbytes <= copies.inbox.shape[1]
