"""Top-k, top-p and min-p without a sort: each row's filters become one bound on its scaled logits.

All three keep the likeliest ids of a row, so what they keep is told by the lowest logit that stays and, where several
ids have it, the last of those. Sampling reads the bound; the logits themselves are not written.

`apply_bitmask` rules ids out of logits: a bit an id, for the rows that have a mask. The host computes the masks
(grammars).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.sampling.filters_triton import filter_bounds_kernel, integer_probabilities, search_bounds
from strata.kernels.sampling.sampling import scaled
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


def _bounds_cost(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, workload: Workload
) -> Cost:
    # A mass of about twenty operations an id. Rows stay in the second-level cache between passes.
    read = logits.nbytes + temperatures.nbytes + top_k.nbytes + top_p.nbytes + min_p.nbytes
    return Cost(flops=20 * logits.numel(), read=read, written=8 * logits.shape[0])


def _bounds_meta(logits: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    lowest = logits.new_empty(rows, dtype=torch.float32, device="meta")
    return lowest, logits.new_empty(rows, dtype=torch.int32, device="meta")


@operation(_bounds_cost, meta=_bounds_meta)
def filter_bounds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """What min-p, then top-k, then top-p keep of each row: (lowest [rows] float32, last [rows] int32).

    logits [rows, vocab] of any float dtype; temperatures [rows] float32 divide them first, 0 leaves them; top_k [rows]
    int32, 0 for no limit; top_p [rows] float32 in (0, 1]; min_p [rows] float32 in [0, 1]. An id stays if its scaled
    logit is above `lowest`, or equals it and the id is at most `last`.

    min-p (Nguyen et al. 2024) removes ids whose logit is more than -log(min_p) under the largest. top-k keeps the k
    largest logits and all that equal the k-th. top-p (Holtzman et al. 2020) keeps the fewest of the remaining ids,
    likeliest first and lower ids first among equals, whose `integer_probabilities` reach `top_p` of their sum. The
    bounds of a row with NaN or infinity are unspecified.
    """
    scores = scaled(logits, temperatures)
    largest = scores.amax(-1, keepdim=True)
    floor = torch.log(min_p.double()).float()[:, None]
    values = scores.masked_fill(scores - largest < floor, -torch.inf).sort(-1, descending=True).values
    vocab = scores.shape[1]
    last_kept = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()[:, None] - 1
    kept = (values >= values.gather(1, last_kept)) & (values > -torch.inf)
    mass = integer_probabilities(values - largest) * kept
    through = mass.cumsum(-1)
    wanted = (top_p.double() * through[:, -1].double()).ceil().long()
    kept &= (through - mass < wanted[:, None]) | (top_p >= 1)[:, None]
    lowest = values.gather(1, kept.sum(-1, keepdim=True).clamp(min=1) - 1)
    equals = (scores == lowest).cumsum(-1)
    last = (equals >= (kept & (values == lowest)).sum(-1, keepdim=True)).int().argmax(-1)
    return lowest[:, 0], last.int()


@filter_bounds.implement("torch", "cpu", invariant=True)
def _bounds_cpu(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Only rows with a filter are sorted."""
    rows = (((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperatures > 0)).nonzero()[:, 0]
    lowest = torch.full(top_p.shape, -torch.inf)
    last = torch.full(top_p.shape, logits.shape[1], dtype=torch.int32)
    if len(rows):
        parameters = (parameter[rows] for parameter in (temperatures, top_k, top_p, min_p))
        lowest[rows], last[rows] = filter_bounds.reference(logits[rows], *parameters)
    return lowest, last


filter_bounds.in_triton(search_bounds, invariant=True, kernels=(filter_bounds_kernel,))
