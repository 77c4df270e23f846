"""Copies of a rank's shards in host memory, which a thread writes while training changes the originals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from strata.train.checkpoints.index import DTYPES
from strata.train.checkpoints.state import StateShard

# PyTorch rounds each pinned allocation up to a power of two: one of 12 GB would take 16.
_CHUNK_BYTES = 1 << 28


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
    """The shards that this rank writes, and where each lies in a buffer: one after another, as in its file."""

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
        self.edges = [0, *accumulate(shard.tensor.nbytes for shard in self.shards)]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.edges[-1]

    @property
    def is_on_device(self) -> bool:
        """Whether a shard is on a GPU."""
        return any(shard.tensor.is_cuda for shard in self.shards)

    def copy(self, buffer: HostBuffer, *, from_device: bool) -> None:
        """Copy the shards of a GPU, on the current stream and without waiting for it; or those of the host, at once."""
        for shard, first, end in zip(self.shards, self.edges, self.edges[1:], strict=False):
            if shard.tensor.is_cuda == from_device:
                views = list(buffer.views(first, end))
                parts = shard.tensor.view(torch.uint8).split([len(view) for view in views])
                for view, part in zip(views, parts, strict=True):
                    view.copy_(part, non_blocking=from_device)
