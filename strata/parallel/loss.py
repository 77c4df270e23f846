"""Cross-entropy over a vocabulary that the tensor axis divides: no rank ever holds all logits of a token."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Axis
from strata.kernels.loss.loss import IGNORED, linear_cross_entropy, logit_gradients, row_chunks
from strata.parallel.families import span


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
