"""Rules ids out of logits: a bit an id, for the rows that have a mask. The host computes the masks (grammars)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl

# Ids of one word of a mask.
WORD = 32


def _cost(logits: Tensor, masks: Tensor, which: Tensor, first: int | None = None, *, workload: Workload) -> Cost:
    # A shift and an and find the bit of an id. At most all logits are ruled out.
    at = first or 0
    words = min(masks.shape[1], ceil_div(at + logits.shape[1], WORD) - at // WORD)
    return Cost(flops=2 * logits.numel(), read=4 * len(masks) * words + which.nbytes, written=logits.nbytes)


@operation(_cost, mutates=("logits",))
def apply_bitmask(logits: Tensor, masks: Tensor, which: Tensor, first: int | None = None) -> Tensor:
    """Write `-inf` over the ids that a row's mask rules out: logits [rows, vocab] of any float dtype, given back.

    masks [any, words] int32: bit `i % 32` of word `i // 32` is 1 where id i is allowed; a word for every id at least.
    which [rows] int32: the mask of each row, -1 where nothing is ruled out. first: the id of the first column, None for
    0 where the columns are all ids.
    """
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) + (first or 0)
    words = masks[which.clamp(min=0).long()][:, (ids // WORD).long()]
    ruled_out = ((words >> (ids % WORD)) & 1 == 0) & (which >= 0)[:, None]
    return logits.masked_fill_(ruled_out, -torch.inf)


apply_bitmask.by_definition("cpu", invariant=True)


_BLOCK = 4096


# The masks of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("masks", "which", "first_id"))
def apply_bitmask_kernel(logits, masks, which, vocab, words, row_stride, first_id, BLOCK: tl.constexpr):
    """A block of one row. first_id: of the first column; None: 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = column
    if first_id is not None:
        ids += first_id
    mask = tl.load(which + row).to(tl.int64)
    word = tl.load(masks + mask * words + (ids >> 5), mask=(column < vocab) & (mask >= 0), other=-1)
    out = (column < vocab) & ((word >> (ids & 31)) & 1 == 0)
    tl.store(logits + row * row_stride + column, -float("inf"), mask=out)


def _triton(logits: Tensor, masks: Tensor, which: Tensor, first: int | None = None) -> Tensor:
    rows, vocab = logits.shape
    if rows and vocab:
        apply_bitmask_kernel[(rows, ceil_div(vocab, _BLOCK))](
            logits, masks, which, vocab, masks.shape[1], logits.stride(0), first, BLOCK=_BLOCK, num_warps=4
        )
    return logits


apply_bitmask.in_triton(_triton, invariant=True, kernels=(apply_bitmask_kernel,))
