"""The loss of a language model without its logits: output projection and cross-entropy, a chunk of tokens at a time.

The loss of a language model and its gradients in one pass: the logits are computed once and become their gradient.

A backward pass of its own would need every logit again, which is a third more products of the head (the pass is that of
Liger Kernel, Hsu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import implementations_for
from strata.kernels.gradient_target import Memory
from strata.kernels.linear.into import put_product
from strata.kernels.op import operation
from strata.kernels.plain_tensor import all_plain
from strata.kernels.triton_import import jit, tl

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


def _gradients_cost(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    logits_bytes: int,
    into: Memory | None = None,
    *,
    workload: Workload,
) -> Cost:
    forward = linear_cross_entropy.cost(hidden, weight, targets, workload=workload)
    # Two more products, and for every logit a division by the sum and the scale.
    flops = forward.flops + 4 * hidden.shape[0] * weight.numel() + 2 * hidden.shape[0] * weight.shape[0]
    read, written = forward.read, 4 + hidden.nbytes + (weight if into is None else into[0]).nbytes
    if into is not None and into[1]:
        flops, read = flops + weight.numel(), read + into[0].nbytes
    return Cost(flops, read, written, forward.weights)


def _gradients_meta(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, logits_bytes: int, into: Memory | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta")
    of_weight = weight.new_empty(weight.shape, device="meta") if into is None else into[0]
    return loss, hidden.new_empty(hidden.shape, device="meta"), of_weight


@operation(_gradients_cost, meta=_gradients_meta)
def cross_entropy_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, logits_bytes: int, into: Memory | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale` times the sum of `linear_cross_entropy`, and its gradients with respect to `hidden` and `weight`.

    hidden [tokens, width] and weight [vocab, width] of one dtype, targets [tokens] int32 or int64, -100 where a token
    has no loss; scale [] float32. logits_bytes: what the logits that exist at once may take. into: memory like weight,
    or wider, for the weight's gradient, and whether to add to what it holds.
    Returns the loss [] float32 (float64 for float64 input) and gradients like hidden and weight; the latter in its
    `into`, if it is given.
    """
    with torch.enable_grad():
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = linear_cross_entropy.reference(*leaves, targets).sum() * scale
        of_hidden, of_weight = torch.autograd.grad(loss, leaves)
    if into is not None:
        memory, adds = into
        of_weight = memory.add_(of_weight) if adds else memory.copy_(of_weight)
    return loss.detach(), of_hidden, of_weight


@jit
def softmax_gradient_kernel(logits, targets, scale, losses, vocab, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row: its cross-entropy, and the logits' gradient in the place of the logits.

    Each place of a block keeps a maximum and a sum of its own, so that nothing is reduced until the row is read.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    factor = tl.load(scale)
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        held = first + column < vocab
        value = tl.load(logits + first + column, mask=held, other=-float("inf")).to(tl.float32) * 1.4426950408889634
        larger = tl.maximum(largest, value)
        # A place that has seen nothing finite has no sum; -inf less -inf would be NaN.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp2(largest - base) + tl.exp2(value - base)
        largest = larger
    highest = tl.max(largest, 0)
    log_sum = highest + tl.log2(tl.sum(total * tl.exp2(largest - highest), 0))
    counted = target != IGNORED
    at_target = tl.load(logits + tl.where(counted, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, factor * (log_sum / 1.4426950408889634 - at_target), 0.0))
    factor = tl.where(counted, factor, 0.0)
    tl.debug_barrier()  # every thread has read the target's logit
    for first in range(0, vocab, BLOCK):
        held = first + column < vocab
        value = tl.load(logits + first + column, mask=held, other=-float("inf")).to(tl.float32)
        slope = tl.exp2(value * 1.4426950408889634 - log_sum) - tl.where(first + column == target, 1.0, 0.0)
        tl.store(logits + first + column, (slope * factor).to(logits.dtype.element_ty), mask=held)


# All of a multiprocessor for one row, so that the rows under way are still in the L2 cache when they are read again.
_BLOCK = 16384
_WARPS = 32


def _supports(hidden: Tensor, weight: Tensor, *others: object) -> bool:
    return hidden.dtype == weight.dtype == torch.bfloat16  # float16 has no room for gradients of a mean over tokens


def _triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, logits_bytes: int, into: Memory | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, vocab = targets.numel(), weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(hidden)
    targets = targets.contiguous()
    chunks = list(_row_chunks(tokens, logits_bytes // (vocab * hidden.element_size())))
    of_weight, adds = into or (torch.empty_like(weight), False)
    # Sums over chunks are kept wide: the weight's gradient is a sum over all tokens.
    sums = torch.empty_like(weight, dtype=torch.float32) if into is None and len(chunks) > 1 else of_weight
    if not chunks and not adds:
        sums.zero_()
    for rows in chunks:
        logits = F.linear(hidden[rows], weight)
        softmax_gradient_kernel[(logits.shape[0],)](
            logits,
            targets[rows],
            scale,
            losses[rows],
            vocab,
            logits.stride(0),
            IGNORED=IGNORED,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
        torch.mm(logits, weight, out=of_hidden[rows])
        put_product(sums, logits.t(), hidden[rows], adds=adds)
        adds = True
        del logits  # before the next chunk's
    return losses.sum(), of_hidden, of_weight if sums is of_weight else of_weight.copy_(sums)


def _row_chunks(tokens: int, most: int) -> Iterator[slice]:
    """As few chunks as `most` rows at once allow, of equal size up to a multiple of 256 rows (a product's tile)."""
    if not tokens:
        return
    count = -(-tokens // max(1, most))
    even = -(-tokens // count)
    rows = min(max(1, most), -(-even // 256) * 256)
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


cross_entropy_gradients.in_triton(_triton, supports=_supports)


def _summed_cost(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, *, workload: Workload) -> Cost:
    each = linear_cross_entropy.cost(hidden, weight, targets, workload=workload)
    return Cost(each.flops + targets.numel() + 1, each.read + scale.nbytes, 4, each.weights)


def _summed_meta(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta")


@operation(_summed_cost, meta=_summed_meta)
def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """`scale` times the sum of `linear_cross_entropy`: [] float32 (float64 for float64 input), with gradients.

    The first three are as there; scale: [] in the dtype of the result, without a gradient.
    """
    losses: Tensor = linear_cross_entropy.reference(hidden, weight, targets)
    return losses.sum() * scale


@summed_cross_entropy.implement("chunks", "cpu", differentiable=True)
def _summed_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    losses: Tensor = linear_cross_entropy(hidden, weight, targets)
    return losses.sum() * scale


# What the logits that exist at once may take beside the activations of a model, if sums over chunks have their memory.
CHUNK_BYTES = 2**30


class _LossWithGradients(torch.autograd.Function):
    """The gradients are there as soon as the loss is; the weight's is kept until the backward pass, which multiplies
    both by the gradient of the loss, rounded to their dtype: 1 in a training step.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        loss, of_hidden, of_weight = cross_entropy_gradients(hidden, weight, targets, scale, CHUNK_BYTES)
        ctx.save_for_backward(of_hidden, of_weight)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * grads[0].to(of_hidden.dtype), of_weight * grads[0].to(of_weight.dtype), None, None


def _both_wanted(hidden: Tensor, weight: Tensor, *others: Tensor) -> bool:
    wanted = hidden.requires_grad and weight.requires_grad and hidden.dtype == weight.dtype == torch.bfloat16
    # Only the kernel makes gradients of a chunk of logits at a time.
    return wanted and all_plain(hidden, weight) and implementations_for(hidden.device) == hidden.device.type


summed_cross_entropy.in_triton(
    _LossWithGradients.apply, "gradients at once", differentiable=True, supports=_both_wanted
)
summed_cross_entropy.implement("chunks", "cuda", differentiable=True)(_summed_chunks)
