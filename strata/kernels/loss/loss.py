"""The loss of a language model without its logits: output projection and cross-entropy, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation

IGNORED = -100

# Logits that exist at once: 256 MiB in float32.
CHUNK_ELEMENTS = 1 << 26


def _cost(hidden: Tensor, weight: Tensor, targets: Tensor, *, workload: Workload) -> Cost:
    tokens, vocab = targets.numel(), weight.shape[0]
    # The product; then for every logit a subtraction, an exponential and a sum.
    flops = 2 * tokens * weight.numel() + 3 * tokens * vocab
    return Cost(flops, hidden.nbytes + weight.nbytes + targets.nbytes, 4 * tokens, weight.nbytes)


def _meta(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return hidden.new_empty(targets.shape, dtype=_wide(hidden.dtype), device="meta")


@operation(_cost, meta=_meta, dense=True)
def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits `hidden @ weight^T` against `targets`, for each token by itself.

    hidden [tokens, width] and weight [vocab, width] of one dtype, targets [tokens] int32 or int64, -100 where a token
    has no loss -> [tokens] float32 (float64 for float64 input), 0 where the target is -100. The softmax is computed in
    the dtype of the result.
    """
    logits = F.linear(hidden, weight).to(_wide(hidden.dtype))
    return F.cross_entropy(logits, targets.long(), ignore_index=IGNORED, reduction="none")


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps only the log of each token's normalizer; the backward pass computes the logits once more."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss = hidden.new_empty(targets.shape, dtype=_wide(hidden.dtype))
        normalizers = torch.empty_like(loss)
        counted = targets != IGNORED
        targets = torch.where(counted, targets, 0).long()
        for rows in row_chunks(targets.numel(), weight.shape[0]):
            logits = F.linear(hidden[rows], weight).to(loss.dtype)
            normalizers[rows] = torch.logsumexp(logits, -1)
            loss[rows] = normalizers[rows] - logits.gather(1, targets[rows, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight, targets, counted, normalizers)
        return loss * counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, counted, normalizers = ctx.saved_tensors
        return *logit_gradients(ctx, hidden, weight, targets, counted, normalizers, grads[0] * counted), None


def logit_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor, own: Tensor, normalizers: Tensor, scale: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `hidden` and `weight`, each if `ctx` needs it, from logits that are computed once more.

    columns [tokens] int64: the logit of each token's target, if that is one of these (own [tokens] bool). normalizers
    [tokens]: the log of the sum of the exponentials of a token's logits. scale [tokens]: the gradient of its loss.
    """
    of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    # Sums over chunks are kept wide: the weight's gradient is a sum over all tokens.
    of_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
    for rows in row_chunks(columns.numel(), weight.shape[0]):
        # The gradient of the logits: softmax less one at the target, times the gradient of the token's loss.
        slope = F.linear(hidden[rows], weight).to(normalizers.dtype).sub_(normalizers[rows, None]).exp_()
        slope.scatter_add_(1, columns[rows, None], -own[rows, None].to(slope.dtype))
        narrow = slope.mul_(scale[rows, None]).to(hidden.dtype)
        if of_hidden is not None:
            torch.mm(narrow, weight, out=of_hidden[rows])
        if of_weight is not None:
            of_weight += narrow.t() @ hidden[rows]
    return of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


linear_cross_entropy.implement("chunks", "cpu", "cuda", differentiable=True)(_LinearCrossEntropy.apply)


def row_chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Rows whose logits make up at most `CHUNK_ELEMENTS`, one at least."""
    rows = max(1, CHUNK_ELEMENTS // vocab)
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
