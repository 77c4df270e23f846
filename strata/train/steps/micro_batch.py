"""From a pack on the host to what a rank computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.comm.mesh import Axis
from strata.kernels.loss.loss import IGNORED
from strata.models.batch import Batch
from strata.parallel.context import Method, divide_batch
from strata.parallel.loss import MicroBatch
from strata.parallel.zigzag import Zigzag
from strata.train.data.pack import PackedBatch, move
from strata.train.steps.objective import Columns

_DOCUMENTS = "documents"


def micro_batch(
    packed: PackedBatch, columns: Columns | None, scale: Tensor, device: torch.device, context: Axis, method: Method
) -> MicroBatch:
    """The pack on the device, or this rank's tokens of it along `context`, with what the loss needs of those.

    scale: see `MicroBatch`. method: how attention crosses the ranks, see `divide_batch`.
    """
    batch, rows, targets = packed.to(device)
    own: slice | NDArray[np.int64] = slice(None)
    if context.group is not None:
        lengths = packed.lengths.tolist()
        numbers = _every_token(packed, np.arange(len(packed.targets)), -1)
        numbers = numbers[Zigzag(tuple(lengths), context.size).rows(context.index)]
        counted = np.flatnonzero(numbers >= 0)
        own = numbers[counted]
        batch = divide_batch(batch, lengths, context, method)
        rows, targets = move(counted, device), move(packed.targets[own], device)
    by_target, by_document = _columns(packed, columns)
    moved = {name: move(one[own], device) for name, one in by_target.items()}
    moved |= {name: move(one, device) for name, one in by_document.items()}
    return MicroBatch(batch, rows, targets, scale, context, moved.get(_DOCUMENTS), moved)


def whole_arrays(packed: PackedBatch, columns: Columns | None) -> dict[str, NDArray[Any]]:
    """By name what a loss needs where every token has a target, -100 if it does not count: of the same shapes for all
    packs of the same number of tokens and documents.
    """
    by_target, by_document = _columns(packed, columns)
    whole = {name: _every_token(packed, one, 0) for name, one in by_target.items()}
    return {"targets": _every_token(packed, packed.targets, IGNORED), **whole, **by_document}


def whole_batch(packed: PackedBatch, columns: Columns | None, scale: Tensor, context: Axis) -> MicroBatch:
    """The pack on the device of `scale`, with a target for every token."""
    moved = {name: move(one, scale.device) for name, one in whole_arrays(packed, columns).items()}
    return of_whole(packed.to(scale.device)[0], moved, scale, context)


def of_whole(batch: Batch, needed: Mapping[str, Tensor], scale: Tensor, context: Axis) -> MicroBatch:
    """A batch with its `whole_arrays` on the device."""
    return MicroBatch(batch, None, needed["targets"], scale, context, needed.get(_DOCUMENTS), needed)


def _columns(packed: PackedBatch, columns: Columns | None) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Those of the targets, with the documents that they are of, and those of the documents."""
    if columns is None:
        return {}, {}
    return {_DOCUMENTS: packed.homes, **columns.targets}, dict(columns.documents)


def _every_token(packed: PackedBatch, each: NDArray[Any], missing: int) -> NDArray[Any]:
    """[tokens, ...] of [targets, ...]."""
    whole = np.full((len(packed.tokens), *each.shape[1:]), missing, dtype=each.dtype)
    whole[packed.rows] = each
    return whole
