"""Log-probabilities of logits that ranks divide: each tells of its own part what the whole row's follow from.

A rank holds the logits of ids [first, first + part). The ranks speak twice: of `logprobs_in_part`, and once the chosen
logits are known of `count_above`, which adds up to the ranks of the chosen ids.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.sampling.score_keys import NO_KEY, key_ids, key_scores, score_keys
from strata.kernels.triton_import import jit, tl

_BLOCK = 4096


def _cost(logits: Tensor, *, workload: Workload) -> Cost:
    # The largest, a difference, an exponential, a sum.
    return Cost(flops=4 * logits.numel(), read=logits.nbytes, written=8 * logits.shape[0])


def _meta(logits: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0], 2), dtype=torch.float32, device="meta")


@operation(_cost, meta=_meta)
def exponential_sums(logits: Tensor) -> Tensor:
    """The largest logit of each row, and the sum of e^(logit - largest): logits [rows, part] -> [rows, 2] float32.

    Of a row that is -inf, or has no ids, they are -inf and 0.
    """
    if not logits.shape[1]:
        return logits.new_tensor([-torch.inf, 0.0], dtype=torch.float32).expand(len(logits), 2)
    values = logits.float()
    largest = values.amax(-1, keepdim=True)
    total = (values - largest.masked_fill(largest == -torch.inf, 0)).exp().sum(-1, keepdim=True)
    return torch.cat((largest, total), 1)


# ATen adds each row up by itself on CPU.
exponential_sums.by_definition("cpu", invariant=True)


# The rows of an odd vocabulary begin at any address, and a slice of rows does too.
@partial(jit, unspecialized=("logits", "row_stride"))
def exponential_sums_kernel(logits, result, part, row_stride, BLOCK: tl.constexpr):
    """One program a row: its sums run in an order that depends on the part's size only."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for at in range(0, part, BLOCK):
        values = tl.load(start + at + lane, mask=at + lane < part, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, values)
    top = tl.max(largest, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(0, part, BLOCK):
        values = tl.load(start + at + lane, mask=at + lane < part, other=-float("inf")).to(tl.float32)
        total += tl.exp(values - shift)
    tl.store(result + row * 2, top)
    tl.store(result + row * 2 + 1, tl.sum(total, 0))


def _triton(logits: Tensor) -> Tensor:
    rows, part = logits.shape
    result = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    if rows:
        exponential_sums_kernel[(rows,)](logits, result, part, logits.stride(0), BLOCK=_BLOCK, num_warps=8)
    return result


exponential_sums.in_triton(_triton, invariant=True, kernels=(exponential_sums_kernel,))


def logprobs_in_part(logits: Tensor, ids: Tensor, top: int, first: int) -> Tensor:
    """What a rank tells of its logits [rows, part] for log-probabilities: [rows, 2 + top] int64.

    ids [rows]: chosen, of any rank. First the bits of `exponential_sums`, then keys: of the chosen logit, `NO_KEY` on
    ranks that do not hold it, and of the `top` likeliest, as many as there are and then `NO_KEY`.
    """
    rows, part = logits.shape
    sums = exponential_sums(logits).contiguous().view(torch.int64)
    column = ids.long()[:, None] - first
    inside = (column >= 0) & (column < part)
    absent = torch.full((rows, 1), NO_KEY, device=logits.device)
    if not part:
        return torch.cat((sums, absent.expand(-1, 1 + top)), 1)
    chosen = score_keys(logits.gather(1, column.clamp(0, part - 1)), column + first)
    likeliest, columns = logits.topk(min(top, part), -1)
    found = torch.cat((sums, torch.where(inside, chosen, absent), score_keys(likeliest, columns + first)), 1)
    return F.pad(found, (0, 2 + top - found.shape[1]), value=NO_KEY)


def logprobs_of_parts(found: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities from what all ranks told, [rows, parts, 2 + top] int64 in the order of their ids.

    Returns the chosen logits [rows] float32, which `count_above` counts by, and as `logprobs`: log-probabilities of
    the chosen ids [rows] float32, the likeliest ids [rows, top] int32, lower ones first among equals, and theirs
    [rows, top] float32; `top` is at most `vocabulary`, the number of all ids.
    """
    sums = found[:, :, :1].contiguous().view(torch.float32)
    largest = sums[:, :, 0].amax(-1)
    shares = sums[:, :, 1] * (sums[:, :, 0] - largest[:, None]).exp()
    total = shares[:, 0]
    for share in shares.unbind(1)[1:]:  # in the order of the ranks, on every one of them
        total = total + share
    log_total = total.log()
    chosen = key_scores(found[:, :, 1].amax(-1))
    top = min(found.shape[2] - 2, vocabulary)
    keys = found[:, :, 2:].flatten(1).topk(top, -1).values
    return (
        chosen,
        chosen - largest - log_total,
        key_ids(keys),
        key_scores(keys) - largest[:, None] - log_total[:, None],
    )


def count_above(logits: Tensor, chosen: Tensor) -> Tensor:
    """How many logits of a part are above the chosen: logits [rows, part], chosen [rows] -> [rows, 1] int32."""
    return (logits > chosen[:, None]).sum(-1, keepdim=True, dtype=torch.int32)
