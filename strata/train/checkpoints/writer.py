"""A thread that writes one rank's share of a checkpoint: a safetensors file, and for the first rank the run's state.

It writes copies in host memory, while training changes the originals.

The file is written shard by shard from the snapshot, with a checksum over the bytes on their way: the library's own
writer takes whole tensors, makes no checksums and cannot be stopped. CRC-32 runs at 2.1 GiB/s on one core (SHA-256:
1.3), without Python's lock, and finds what disks do to data; nobody forges a checkpoint of his own.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from strata.train.checkpoints.folder import write_durably
from strata.train.checkpoints.index import DTYPES, STATE, StoredShard, key_of
from strata.train.checkpoints.state import StateShard

# PyTorch rounds each pinned allocation up to a power of two: one of 12 GB would take 16.
_CHUNK_BYTES = 1 << 28
# Bytes that are summed up and written at once. In smaller blocks the thread would ask too often for Python's lock.
_BLOCK_BYTES = 1 << 24
# The error of a rank that `stop` ended.
STOPPED = "stopped"


class _Stopped(Exception):
    """Another rank failed, so that there is nothing to write for."""


class HostBuffer:
    """Bytes in host memory, allocated once and used for every checkpoint. pinned: a GPU copies into it by itself."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        self._chunks = [
            torch.empty(min(_CHUNK_BYTES, size - first), dtype=torch.uint8, pin_memory=pinned)
            for first in range(0, size, _CHUNK_BYTES)
        ]

    def views(self, first: int, end: int) -> Iterator[Tensor]:
        """The bytes `first` to `end` - 1, each stretch of memory a uint8 tensor."""
        while first < end:
            chunk, at = divmod(first, _CHUNK_BYTES)
            size = min(end - first, _CHUNK_BYTES - at)
            yield self._chunks[chunk][at : at + size]
            first += size


class Snapshot:
    """The shards that this rank writes, one after another in a buffer, as in its file.

    size: bytes. places: of each shard its first byte and the first after it.
    """

    def __init__(self, shards: Sequence[StateShard]) -> None:
        """Raises ValueError for a shard that cannot be stored."""
        for shard in shards:
            tensor = shard.tensor
            if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{shard.kind} of {shard.name} must be flat, contiguous and of a float dtype, not {tensor.dtype} "
                    f"{list(tensor.shape)} with strides {list(tensor.stride())}"
                )
        counted = [shard for shard in shards if shard.is_written]
        # Wide elements first, so that all are aligned.
        self.shards = sorted(counted, key=lambda shard: -shard.tensor.itemsize)
        edges = [0, *accumulate(shard.tensor.nbytes for shard in self.shards)]
        self.size = edges[-1]
        self.places = [(shard, *ends) for shard, ends in zip(self.shards, pairwise(edges), strict=True)]

    @property
    def is_on_device(self) -> bool:
        """Whether a shard is on a GPU."""
        return any(shard.tensor.is_cuda for shard in self.shards)

    def copy(self, buffer: HostBuffer, *, from_device: bool) -> None:
        """Copy the shards of a GPU, on the current stream and without waiting for it; or those of the host, at once."""
        for shard, first, end in self.places:
            if shard.tensor.is_cuda == from_device:
                views = list(buffer.views(first, end))
                parts = shard.tensor.view(torch.uint8).split([len(view) for view in views])
                for view, part in zip(views, parts, strict=True):
                    view.copy_(part, non_blocking=from_device)


class ShareReport(msgspec.Struct, frozen=True):
    """What the first rank needs to know of a share. files: by name the bytes of each. state_crc32: of `state.json`, 0
    where another rank writes it. error: what went wrong, in words, or None.
    """

    files: dict[str, int]
    state_crc32: int
    shards: list[StoredShard]
    error: str | None


class ShareWriter:
    """Writes one rank's share in a thread of its own. report: None until that has ended, well or not."""

    def __init__(
        self,
        part: Path,
        rank: int,
        state: str | None,
        snapshot: Snapshot,
        buffer: HostBuffer,
        complete: Callable[[], None],
        copied: Callable[[], None],
    ) -> None:
        """part: the folder to write into. state: the text of `state.json`, or None if another rank writes it.

        complete: returns when the tensors on the host have their values; copied: when those of the device are in
        `buffer`. Both are called by the thread.
        """
        self.part, self.rank, self._state = part, rank, state
        self._snapshot, self._buffer = snapshot, buffer
        self._complete, self._copied = complete, copied
        self.report: ShareReport | None = None
        self._is_stopped = False
        self._host_copied = threading.Event()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def wait_for_host_copies(self) -> None:
        """Until the shards on the host may change."""
        self._host_copied.wait()

    def stop(self) -> None:
        """Let the thread end soon, with an error."""
        self._is_stopped = True

    def _run(self) -> None:
        files: dict[str, int] = {}
        shards: list[StoredShard] = []
        state_crc32, error = 0, None
        try:
            self._copy()
            self.part.mkdir(parents=True, exist_ok=True)
            if self._state is not None:
                data = self._state.encode()
                write_durably(self.part / STATE, data)
                files[STATE], state_crc32 = len(data), zlib.crc32(data)
            if self._snapshot.shards:
                name = f"rank-{self.rank:05}.safetensors"
                files[name], shards = self._write_tensors(name)
        except _Stopped:
            error = STOPPED
        except Exception as raised:  # whatever it is, the other ranks wait to hear of it
            error = f"{type(raised).__name__}: {raised}"
        self.report = ShareReport(files, state_crc32, shards, error)

    def _copy(self) -> None:
        try:
            self._complete()
            self._snapshot.copy(self._buffer, from_device=False)
        finally:
            self._host_copied.set()
        self._copied()

    def _write_tensors(self, name: str) -> tuple[int, list[StoredShard]]:
        """Bytes of the file, and what is in it."""
        header, shards = self._header(), []
        with (self.part / name).open("wb") as stream:
            stream.write(header)
            for shard, first, end in self._snapshot.places:
                crc32 = self._write_bytes(stream, first, end)
                dtype = str(shard.tensor.dtype).removeprefix("torch.")
                place = shard.shape, shard.box, shard.start, shard.tensor.numel()
                shards.append(StoredShard(name, shard.kind, shard.name, *place, dtype, crc32))
            stream.flush()
            os.fsync(stream.fileno())
        return len(header) + self._snapshot.size, shards

    def _write_bytes(self, stream: BinaryIO, first: int, end: int) -> int:
        """Write a stretch of the buffer. Returns its checksum."""
        crc32 = 0
        for view in self._buffer.views(first, end):
            data = view.numpy().data
            for at in range(0, len(data), _BLOCK_BYTES):
                if self._is_stopped:
                    raise _Stopped
                block = data[at : at + _BLOCK_BYTES]
                crc32 = zlib.crc32(block, crc32)
                stream.write(block)
        return crc32

    def _header(self) -> bytes:
        """Length and JSON, padded so that the data is aligned (https://github.com/huggingface/safetensors)."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for shard, first, end in self._snapshot.places:
            entries[key_of(shard.kind, shard.name)] = {
                "dtype": DTYPES[shard.tensor.dtype],
                "shape": [shard.tensor.numel()],
                "data_offsets": [first, end],
            }
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
