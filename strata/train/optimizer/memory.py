"""Where masters and moments lie: on the device, or in pinned host memory, from where blocks stream through the GPU.

The device updates them in both cases, so the results are the same bit for bit. An update by the CPU would save the
messages of the moments, but has to move more bytes through the host's memory, which all GPUs of a host share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.parallel.data_parallel import ParameterShard
from strata.train.optimizer.sharded_optimizer import has_separate_master

# With state on the host: elements of a tensor that are copied at once; how many of such blocks are on the device at the
# same time (one arrives, one is worked on and one leaves); the most tensors of a block (masters and two moments).
BLOCK, SLOTS, TENSORS = 1 << 22, 3, 3
STREAMED_BYTES = 4 * BLOCK * SLOTS * TENSORS

# Work on a range of elements, given that range of every state tensor, on the device; what it writes there stays.
Work = Callable[[slice, Sequence[Tensor]], None]


class StateMemory:
    """Keeps the state of an optimizer, here beside the weights, and gives it to work on the device.

    keeps_masters: whether masters leave the memory that they had in the shards.
    """

    keeps_masters = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def masters(self, shards: Sequence[ParameterShard]) -> list[Tensor]:
        """Of each shard, flat, where they lie from now on."""
        return [shard.master.detach().view(-1) for shard in shards]

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros, for state."""
        return torch.zeros(count, dtype=dtype, device=self._device)

    def start(self) -> None:
        """Before the first `run` of an update."""

    def run(self, state: Sequence[Tensor], work: Work) -> None:
        """Do `work` on flat tensors of equally many elements, at once or block by block, in order."""
        work(slice(0, state[0].numel()), state)

    def finish(self) -> None:
        """After the last `run` of an update: what the device does next sees all of it done."""


class HostMemory(StateMemory):
    """State lies in pinned host memory. Blocks are copied in, worked on and copied out at the same time.

    Masters that are the weights stay on the device, because the model computes with them.
    """

    keeps_masters = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, block: int = BLOCK, slots: int = SLOTS, tensors: int = TENSORS
    ) -> None:
        """dtype: of the state. block: elements of a tensor that are copied at once. slots: blocks on the device at the
        same time. tensors: the most that `run` is given.
        """
        super().__init__(device)
        self._block = block
        self._inward, self._outward = _stream(device), _stream(device)
        self._slots = [_Slot(torch.empty(tensors, block, dtype=dtype, device=device)) for _ in range(slots)]
        self._next = 0

    def masters(self, shards: Sequence[ParameterShard]) -> list[Tensor]:
        """Copies the masters to the host and frees their memory on the device: the parameters in `shards` keep shape
        and gradient, and hold no values any more.
        """
        moved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        found = []
        for shard in shards:
            flat = shard.master.detach().view(-1)
            if has_separate_master(shard):
                storage = flat.untyped_storage()
                if storage.data_ptr() not in moved:
                    whole = torch.as_strided(flat, (storage.nbytes() // flat.element_size(),), (1,), 0)
                    moved[storage.data_ptr()] = storage, self.zeros(whole.numel(), whole.dtype).copy_(whole)
                host = moved[storage.data_ptr()][1]
                flat = host[flat.storage_offset() : flat.storage_offset() + flat.numel()]
            found.append(flat)
        for storage, _ in moved.values():
            storage.resize_(0)
        return found

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=self._device.type == "cuda")

    def start(self) -> None:
        now = _mark(self._current())
        for stream in (self._inward, self._outward):
            _wait(stream, now)
        for slot in self._slots:
            slot.left = None

    def run(self, state: Sequence[Tensor], work: Work) -> None:
        count = state[0].numel()
        for first in range(0, count, self._block):
            held = slice(first, min(first + self._block, count))
            self._pass(held, [one[held] for one in state], self._slots[self._next], work)
            self._next = (self._next + 1) % len(self._slots)

    def _pass(self, held: slice, state: Sequence[Tensor], slot: _Slot, work: Work) -> None:
        """One block through the device. Streams wait for each other, and the host for none of them."""
        given = list(state)
        copied = [place for place, one in enumerate(state) if one.device.type == "cpu"]
        with torch.cuda.stream(self._inward):
            _wait(self._inward, slot.left)
            for place in copied:
                given[place] = slot.buffers[place, : len(state[place])].copy_(state[place], non_blocking=True)
        _wait(self._current(), _mark(self._inward))
        work(held, given)
        _wait(self._outward, _mark(self._current()))
        with torch.cuda.stream(self._outward):
            for place in copied:
                state[place].copy_(given[place], non_blocking=True)
        slot.left = _mark(self._outward)

    def finish(self) -> None:
        for stream in (self._inward, self._outward):
            _wait(self._current(), _mark(stream))

    def _current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None


@dataclass
class _Slot:
    """Room on the device for a block of every tensor, and the moment when the last block has left it."""

    buffers: Tensor
    left: torch.cuda.Event | None = None


# A CPU has no streams: what is asked of it is done at once, in order.


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """The end of what the stream has been given so far."""
    return None if stream is None else stream.record_event()


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
