"""What rank 0 and the other ranks of an engine say to each other: msgspec structs, never pickle.

Rank 0 sends `ToFollower`: each makes the calls of the device that it makes itself, in the same order, because the
collectives in them meet. Followers tell a `Value` where all agree on one, or where `CompareIds` asks for it, and what
has failed. The last of several stages, which draws, tells what it has `Drawn`; so does each of the ranks that have
sequences of their own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.engine.plan import StepPlan
from strata.engine.program.shape import StepShape
from strata.engine.runner import ScoredPrompt
from strata.engine.sampler import LogprobTensors


class LaunchStep(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Run a step. drawn: (slot, id) that have become known since the step before, of several stages. room: of the steps
    of all ranks, where the plan is of sequences that this one alone has."""

    plan: StepPlan
    drawn: tuple[tuple[int, int], ...] = ()
    room: StepShape | None = None


class MaskRows(msgspec.Struct, array_like=True, frozen=True):
    """The masks of a step's grammars, see `MasksUnderWay`."""

    buffer: Tensor
    count: int
    words: int


class DrawLaunched(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Draw the step that waits for its masks, if one does. complete: see `Undrawn`."""

    complete: tuple[bool, ...] = ()
    masks: MaskRows | None = None


class Settle(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Wait until nothing of any step is under way."""


class Pool(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Compute the vectors of prompts."""

    prompts: tuple[tuple[tuple[int, ...], Literal["last", "mean"]], ...]


class Agree(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """What all ranks go on with, after each has told its `Value`."""

    value: int


class CompareIds(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Answer with a `Value` that tells the newest ids of all slots apart from others."""


class MoveExperts(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Let the slots of a layer, of all ranks, hold these experts."""

    layer: int
    slots: tuple[int, ...]


class WeightBytes(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The next bytes of a tensor, in pieces because a message has less than 4 GiB; behind the last comes its name."""

    values: bytes


class UpdateWeight(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Let a checkpoint's tensor be the one whose bytes have come, once all ranks have agreed that they can. dtype: as
    torch names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class End(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """End the process."""


ToFollower = (
    LaunchStep | DrawLaunched | Settle | Pool | Agree | CompareIds | MoveExperts | WeightBytes | UpdateWeight | End
)


class Value(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A rank's part of what all agree on."""

    value: int


class Failed(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The rank ends because of this. when: seconds of `time.monotonic()`, which the processes of a machine share.
    traceback: where it came from, of an error that nobody expected."""

    message: str
    when: float
    traceback: str


class Drawn(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """What a step has given. number: of the message of rank 0 by which it was drawn, or launched; see `Launched`."""

    number: int
    ids: tuple[int, ...]
    logprobs: LogprobTensors | None
    prompt_logprobs: tuple[ScoredPrompt, ...]


class Vectors(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The vectors of prompts. number: of the `Pool` that asked for them."""

    number: int
    vectors: Tensor


Answer = Drawn | Vectors
ToLeader = Value | Failed | Drawn | Vectors

_LENGTH = struct.Struct("<I")


def encoder() -> Callable[[object], bytes]:
    return msgspec.msgpack.Encoder(enc_hook=_sent).encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_received).decode


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """[bytes] of a tensor's elements, on the host."""
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # where a size is one, its stride may be anything
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def _sent(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor).tobytes()


def _received(kind: type, sent: tuple[str, tuple[int, ...], bytes]) -> Tensor:
    shape, values, dtype = sent[1], sent[2], getattr(torch, sent[0])
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape) if values else torch.empty(shape, dtype=dtype)


def framed(message: bytes) -> bytes:
    """A message as it travels: its length comes first, because sockets know no messages."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """The messages that come out of a socket, which this only reads."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._read = bytearray()

    def wait(self) -> bytes | None:
        """The next one; None at the end of the connection."""
        while (frame := self.next()) is None:
            if not self.receive():
                return None
        return frame

    def receive(self) -> bool:
        """Take what has come, or wait for it; False at the end of the connection."""
        try:
            received = self._source.recv(1 << 18)
        except ConnectionError:
            return False
        self._read += received
        return bool(received)

    def next(self) -> bytes | None:
        """The next one if all of it has come."""
        if len(self._read) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._read)
        end = _LENGTH.size + length
        if len(self._read) < end:
            return None
        frame = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        return frame
