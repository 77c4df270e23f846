"""From a pack on the host to what a rank computes with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.kernels.loss.loss import IGNORED
from strata.models.batch import Batch
from strata.parallel.context import Method, divide_batch
from strata.parallel.pipeline import MicroBatch
from strata.parallel.zigzag import Zigzag
from strata.train.data.pack import PackedBatch, move

# A batch and a target for every token, [tokens] int64, -100 where it does not count.
WholeBatch = tuple[Batch, Tensor]


def micro_batch(packed: PackedBatch, device: torch.device, context: Axis, method: Method) -> MicroBatch:
    """The pack on the device, or this rank's tokens of it along `context`, with rows and targets of those.

    method: how attention crosses the ranks, see `divide_batch`.
    """
    batch, rows, targets = packed.to(device)
    if context.group is None:
        return MicroBatch(batch, rows, targets)
    lengths = packed.lengths.tolist()
    own = every_target(packed)[Zigzag(tuple(lengths), context.size).rows(context.index)]
    counted = np.flatnonzero(own != IGNORED)
    part = divide_batch(batch, lengths, context, method)
    return MicroBatch(part, move(counted, device), move(own[counted], device))


def whole_batch(packed: PackedBatch, device: torch.device) -> WholeBatch:
    """The pack on the device."""
    return packed.to(device)[0], move(every_target(packed), device)


def every_target(packed: PackedBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[tokens] int64: a target for every token, -100 where it does not count."""
    targets = np.full(len(packed.tokens), IGNORED, dtype=np.int64)
    targets[packed.rows] = packed.targets
    return targets
