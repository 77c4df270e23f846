"""What every training pass is given besides its batches: a loss of hidden states, a head and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from strata.comm.collectives import all_reduce, copy_to
from strata.comm.mesh import Axis
from strata.kernels.loss.loss import IGNORED
from strata.kernels.loss.loss_grad import summed_cross_entropy
from strata.models.batch import Batch
from strata.parallel.loss import vocabulary_cross_entropy


@dataclass(frozen=True)
class Head:
    """The output projection, whose rows the ranks of `axis` may divide: no rank ever has all logits of a token.

    weight: [this rank's rows of the vocabulary, width]. loss_has_gradients: whether a sum may compute its gradients
    with it, and keep them until the backward pass.
    """

    weight: Tensor
    axis: Axis
    vocab_size: int
    loss_has_gradients: bool = True

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Minus the log-probability of each target, [rows] float32 (float64 for float64 input), alike on all ranks of
        the axis; 0 where the target is -100. hidden [rows, width], targets [rows].
        """
        return vocabulary_cross_entropy(hidden, self.weight, targets, self.axis, self.vocab_size)

    def summed_cross_entropy(self, hidden: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """`scale`, [], times the sum of `cross_entropy`, []: what costs least where that is all of a loss."""
        if self.axis.group is None and self.loss_has_gradients:
            total: Tensor = summed_cross_entropy(hidden, self.weight, targets, scale)
            return total
        return self.cross_entropy(hidden, targets).sum() * scale


@dataclass(frozen=True)
class MicroBatch:
    """Packed documents on the device, and what a loss needs of them.

    rows: [rows] int64, the tokens that the loss counts; None for all, of which those do not count whose target is -100.
    targets: [rows]. scale: [] what makes shares of the whole step's mean of sums over this batch. context: the ranks
    that share out the tokens of each document, this batch has a part of the rows then.

    Of an objective with columns: documents, [rows] int64, which one each row is of, and by name its columns,
    [rows, ...] (0 where a row does not count) or, alike on the ranks of `context`, [documents, ...].
    """

    batch: Batch
    rows: Tensor | None
    targets: Tensor
    scale: Tensor
    context: Axis
    documents: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def counted(self, hidden: Tensor) -> Tensor:
        """[rows, width] of the hidden states of all tokens."""
        return hidden if self.rows is None else hidden.index_select(0, self.rows)

    def per_document(self, each: Tensor) -> Tensor:
        """[documents]: sums of `each`, [rows], over the rows of a document that count, on whatever ranks they are.

        A collective call along `context`, and its gradient another: all of its ranks compute with the sums.
        """
        assert self.documents is not None, "documents are known to an objective with columns"
        sums = each.new_zeros(self.batch.offsets.shape[0] - 1).index_add(0, self.documents, self._counted_only(each))
        return copy_to(all_reduce(sums, self.context), self.context)

    def mean_of_rows(self, each: Tensor) -> Tensor:
        """This batch's share, [], of the step's mean of `each`, [rows]."""
        return self._counted_only(each).sum() * self.scale

    def mean_of_documents(self, each: Tensor) -> Tensor:
        """The same of values that all ranks of `context` have alike, of documents, pairs or groups: a part each."""
        return each.sum() * (self.scale / self.context.size)

    def _counted_only(self, each: Tensor) -> Tensor:
        return each if self.rows is not None else torch.where(self.targets != IGNORED, each, 0)


class Loss(Protocol):
    """The loss of a batch of any layout, as a share of the mean over the whole step: shares are added up over batches
    and ranks, whoever holds what.

    metrics: the names of further means, for the log. sums_cross_entropy: whether the loss is `summed_cross_entropy` of
    all targets by the batch's scale, so that a pass may compute it with its gradients.
    """

    metrics: tuple[str, ...]
    sums_cross_entropy: bool

    def __call__(self, hidden: Tensor, head: Head, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """hidden: [rows, width] of the rows of the batch, after the last norm, alike along "tp".

        Returns the share of the loss, [] with its gradient, and those of the metrics, [] each. The host does not wait
        for the device, and all ranks of `batch.context` make the same collective calls.
        """


def shares(loss: Loss, found: tuple[Tensor, Mapping[str, Tensor]]) -> Tensor:
    """[1 + metrics] without gradients: the loss, and the metrics in their order."""
    total, metrics = found
    return torch.stack([total.detach(), *(metrics[name].detach().to(total.dtype) for name in loss.metrics)])
