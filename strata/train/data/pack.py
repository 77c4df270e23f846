"""Which documents share a pack, and how they lie side by side as the model reads them, without padding.

Best fit (Johnson 1973), decreasing for long ones (Ding et al. 2024).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from strata.comm.to_device import to_device
from strata.models.batch import Batch
from strata.train.data.encoding import Encoded


@dataclass(frozen=True)
class Samples:
    """What stands in a pack: positions in the mixture, datasets, and numbers in those, [samples] int64 each.

    tokens: how many it has.
    """

    positions: NDArray[np.int64]
    datasets: NDArray[np.int64]
    numbers: NDArray[np.int64]
    tokens: int


@dataclass(frozen=True)
class PackedBatch:
    """Documents as the model reads them, on the host.

    tokens, positions: [tokens] int32. offsets: [documents + 1] int32. rows: [targets] int64, the tokens whose successor
    the loss counts; targets: [targets] int64, those successors. samples: of a mixture, what they are.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    offsets: NDArray[np.int32]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    samples: Samples | None = None

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.diff(self.offsets)

    @property
    def homes(self) -> NDArray[np.int64]:
        """[targets] int64, which document each target is of."""
        return np.searchsorted(self.offsets, self.rows, side="right") - 1

    def to(self, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
        """The model's batch, rows [targets] and targets [targets] on `device`."""
        batch = Batch(
            move(self.tokens, device), move(self.positions, device), move(self.offsets, device), int(self.lengths.max())
        )
        return batch, move(self.rows, device), move(self.targets, device)


def move(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)


def pack(documents: Encoded, samples: Samples | None = None) -> PackedBatch:
    """The documents in order."""
    tokens, offsets = documents.tokens.astype(np.int32), documents.offsets.astype(np.int32)
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(offsets[:-1], np.diff(offsets))
    predicted = np.flatnonzero(documents.loss_mask)
    return PackedBatch(tokens, positions, offsets, predicted - 1, tokens[predicted].astype(np.int64), samples)


def best_fit(lengths: ArrayLike, capacity: int) -> list[NDArray[np.int64]]:
    """Indices of `lengths` [n] in packs of at most `capacity` tokens each; nothing is cut.

    Each goes into the fullest pack that has room: first those over a quarter of a pack, the longest first, then the
    others in their order. Sorting those as well would fill packs no better, and documents of one length, which are
    often of one kind, would share a pack. Packs are ordered by the first index in them, so that a pack's place says
    nothing about lengths, and indices rise inside a pack.
    """
    sizes = np.asarray(lengths, np.int64)
    if (longest := sizes.max(initial=0)) > capacity:
        raise ValueError(f"a sample of {longest} tokens does not fit a pack of {capacity}")
    shortest = sizes.min(initial=capacity)
    order = np.argsort(np.where(sizes > capacity // 4, -sizes, 0), kind="stable")
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending; without the packs that nothing fits into
    for index, length in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(room, (length, 0))
        if at < len(room):
            left, pack = room.pop(at)
        else:
            left, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        if left - length >= shortest:
            insort(room, (left - length, pack))
    return [np.array(pack) for pack in sorted(sorted(pack) for pack in packs)]
