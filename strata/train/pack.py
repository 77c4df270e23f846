"""Packing whole documents into batches without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.models.batch import Batch
from strata.train.data.encoding import Encoded
from strata.train.shards import Shards


@dataclass(frozen=True)
class PackedBatch:
    """Consecutive documents as the model reads them, on the host.

    tokens, positions: [tokens] int32. offsets: [documents + 1] int32. rows: [targets] int64, the tokens whose successor
    the loss counts; targets: [targets] int64, those successors. next_document: the first that is not in this batch.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    offsets: NDArray[np.int32]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    next_document: int

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.offsets)

    def to(self, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
        """The model's batch, rows [targets] and targets [targets] on `device`."""
        batch = Batch(
            _move(self.tokens, device),
            _move(self.positions, device),
            _move(self.offsets, device),
            int(self.lengths.max()),
        )
        return batch, _move(self.rows, device), _move(self.targets, device)


def _move(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def pack(pieces: list[Encoded], next_document: int) -> PackedBatch:
    """The documents of `pieces` in order; `next_document` is passed on."""
    tokens = np.concatenate([piece.tokens for piece in pieces]).astype(np.int32)
    wanted = np.concatenate([piece.wanted for piece in pieces])
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    predicted = np.flatnonzero(wanted)
    return PackedBatch(tokens, positions, offsets, predicted - 1, tokens[predicted].astype(np.int64), next_document)


class Packer:
    """Batches of at most `budget` tokens, from any document on. Remembers the shard it read last."""

    def __init__(self, shards: Shards, budget: int, longest: int) -> None:
        """longest: the most tokens that a document may have (the model's max_length)."""
        self._shards, self._budget, self._longest = shards, min(budget, 2**31 - 1), longest
        self._held: tuple[int, Encoded] | None = None

    def batch(self, first: int) -> PackedBatch:
        """The longest run of whole documents from `first` on that fits the budget.

        Raises ValueError for a document that is longer than the model or the budget allows: none is ever cut.
        """
        pieces: list[Encoded] = []
        left, position = self._budget, first
        while True:
            shard = self._shard(position // self._shards.documents)
            start = position % self._shards.documents
            base = shard.offsets[start]
            end = int(np.searchsorted(shard.offsets, base + left, side="right")) - 1
            if end > start:
                pieces.append(self._cut(shard, start, end, position))
                left -= int(shard.offsets[end] - base)
                position += end - start
            if end < self._shards.documents:
                break
        if not pieces:
            length = int(shard.offsets[start + 1] - base)
            raise ValueError(f"document {first} has {length} tokens; raise data.tokens_per_batch = {self._budget}")
        return pack(pieces, position)

    def _cut(self, shard: Encoded, start: int, end: int, position: int) -> Encoded:
        offsets = shard.offsets[start : end + 1]
        lengths = np.diff(offsets)
        if lengths.max() > self._longest:
            which = position + int(lengths.argmax())
            raise ValueError(
                f"document {which} has {lengths.max()} tokens; raise max_position_embeddings = {self._longest}"
            )
        span = slice(offsets[0], offsets[-1])
        return Encoded(shard.tokens[span], shard.wanted[span], offsets - offsets[0])

    def _shard(self, index: int) -> Encoded:
        if self._held is None or self._held[0] != index:
            self._held = (index, self._shards.read(index))
        return self._held[1]
