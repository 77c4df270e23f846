"""Copies of a rank's pieces in host memory, which a thread writes while training changes the originals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from strata.train.checkpoints.index import DTYPES
from strata.train.checkpoints.state import Piece

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
    """The pieces that this rank writes, and where each lies in a buffer: one after another, as in its file."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Raises ValueError for a piece that cannot be stored."""
        for piece in pieces:
            tensor = piece.tensor
            if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{piece.kind} of {piece.name} must be flat, contiguous and of a float dtype, not {tensor.dtype} "
                    f"{list(tensor.shape)} with strides {list(tensor.stride())}"
                )
        counted = [piece for piece in pieces if piece.is_counted]
        # Wide elements first, so that all are aligned.
        self.pieces = sorted(counted, key=lambda piece: -piece.tensor.itemsize)
        self.edges = [0, *accumulate(piece.tensor.nbytes for piece in self.pieces)]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.edges[-1]

    @property
    def is_on_device(self) -> bool:
        """Whether a piece is on a GPU."""
        return any(piece.tensor.is_cuda for piece in self.pieces)

    def copy(self, buffer: HostBuffer, *, from_device: bool) -> None:
        """Copy the pieces of a GPU, on the current stream and without waiting for it; or those of the host, at once."""
        for piece, first, end in zip(self.pieces, self.edges, self.edges[1:], strict=False):
            if piece.tensor.is_cuda == from_device:
                views = list(buffer.views(first, end))
                parts = piece.tensor.view(torch.uint8).split([len(view) for view in views])
                for view, part in zip(views, parts, strict=True):
                    view.copy_(part, non_blocking=from_device)
