"""Rules ids out of logits: a bit an id, for the rows that have a mask. The host computes the masks (grammars)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl

# Ids of one word of a mask.
WORD = 32


def _cost(logits: Tensor, masks: Tensor, which: Tensor, *, workload: Workload) -> Cost:
    # A shift and an and find the bit of an id. At most all logits are ruled out.
    return Cost(flops=2 * logits.numel(), read=masks.nbytes + which.nbytes, written=logits.nbytes)


@operation(_cost, mutates=("logits",))
def apply_bitmask(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    """Write `-inf` over the ids that a row's mask rules out: logits [rows, vocab] of any float dtype, given back.

    masks [any, words] int32: bit `i % 32` of word `i // 32` is 1 where id i is allowed; at least vocab / 32 words.
    which [rows] int32: the mask of each row, -1 where nothing is ruled out.
    """
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    words = masks[which.clamp(min=0).long()][:, (ids // WORD).long()]
    ruled_out = ((words >> (ids % WORD)) & 1 == 0) & (which >= 0)[:, None]
    return logits.masked_fill_(ruled_out, -torch.inf)


apply_bitmask.implement("torch", "cpu", invariant=True)(apply_bitmask.reference)


_BLOCK = 4096


# The masks of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("masks", "which"))
def apply_bitmask_kernel(logits, masks, which, vocab, words, row_stride, BLOCK: tl.constexpr):
    """A block of one row."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(which + row).to(tl.int64)
    word = tl.load(masks + mask * words + (ids >> 5), mask=(ids < vocab) & (mask >= 0), other=-1)
    tl.store(logits + row * row_stride + ids, -float("inf"), mask=(ids < vocab) & ((word >> (ids & 31)) & 1 == 0))


def _triton(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    rows, vocab = logits.shape
    if rows:
        apply_bitmask_kernel[(rows, ceil_div(vocab, _BLOCK))](
            logits, masks, which, vocab, masks.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=4
        )
    return logits


if HAS_TRITON:
    apply_bitmask.implement("triton", "cuda", invariant=True, kernels=(apply_bitmask_kernel,))(_triton)


def compile_cases() -> list[CompileCase]:
    signature = {"logits": "*bf16:16", "masks": "*i32", "which": "*i32"}
    signature |= dict.fromkeys(("vocab", "words", "row_stride"), "i32")
    return [CompileCase("apply bitmask", apply_bitmask_kernel, signature, {"BLOCK": _BLOCK}, 4, 2)]
