"""A loss as every training pass is given it: of hidden states, a head and a batch, however ranks divide them."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.comm.collectives import all_reduce, copy_to, start_all_reduce
from strata.comm.mesh import Axis
from strata.kernels.loss.loss import IGNORED, linear_cross_entropy, logit_gradients, row_chunks, summed_cross_entropy
from strata.models.batch import Batch
from strata.parallel.families import span


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


def vocabulary_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """`linear_cross_entropy` with the rows of the head divided over `axis` as `strata.parallel.families.span` divides
    them.

    hidden [tokens, width], alike on all ranks; weight [this rank's rows, width]; targets [tokens] of the whole
    vocabulary, -100 where a token has no loss -> [tokens] float32 (float64 for float64 input), alike on all ranks.

    The gradient of `hidden` is this rank's part of a sum over the axis: the boundary after the last norm, which
    `shard_model` makes, adds the parts up.
    """
    if axis.group is None:
        loss: Tensor = linear_cross_entropy(hidden, weight, targets)
        return loss
    return _VocabularyCrossEntropy.apply(hidden, weight, targets, axis, vocab_size)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Keeps only the log of each token's normalizer; the backward pass computes this rank's logits once more."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, axis: Axis, vocab_size: int) -> Tensor:
        first, end = span(vocab_size, axis.size, axis.index)
        counted = targets != IGNORED
        own = (targets >= first) & (targets < end)
        columns = torch.where(own, targets - first, 0).long()
        normalizers = hidden.new_empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        at_target = torch.empty_like(normalizers)
        for rows in row_chunks(targets.numel(), weight.shape[0]):
            logits = F.linear(hidden[rows], weight).to(normalizers.dtype)
            normalizers[rows] = torch.logsumexp(logits, -1)
            at_target[rows] = logits.gather(1, columns[rows, None]).squeeze(1) * own[rows]
        largest = start_all_reduce(normalizers.clone(), axis, "max").wait()
        sums = torch.stack([(normalizers - largest).exp(), at_target])
        shares, at_target = start_all_reduce(sums, axis).wait()
        normalizers = largest + shares.log()
        ctx.save_for_backward(hidden, weight, columns, own, counted, normalizers)
        return (normalizers - at_target) * counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, columns, own, counted, normalizers = ctx.saved_tensors
        gradients = logit_gradients(ctx, hidden, weight, columns, own, normalizers, grads[0] * counted)
        return *gradients, None, None, None
