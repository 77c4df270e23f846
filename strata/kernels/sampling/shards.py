"""Draws from logits that ranks divide: each finds the best of its ids, and the best of all is what one rank draws.

A rank holds the logits of ids [first, first + part). What the ranks tell each other of a row is one key
(`score_keys`), so a draw is the best key of each part, one all-gather, and the largest key.

`score_keys`: scores and their ids as whole numbers in the order of likelihood, so that the best of parts is the largest
number.

A key holds the score in its upper half, as the integer that has the order of float32, and in its lower half all ones
less the id: of two equal scores the lower id has the larger key.

Log-probabilities, too: each rank tells of its own part what the whole row's follow from. The ranks speak twice: of
`logprobs_in_shard`, and once the chosen logits are known of `count_above`, which adds up to the ranks of the chosen
ids.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.sampling.filters_triton import score_order
from strata.kernels.sampling.sampling import (
    NO_ID,
    best_of_blocks,
    gumbel_blocks_kernel,
    gumbel_noise,
    scaled,
)
from strata.kernels.triton_import import constant, jit, tl

# Less than the key of any score.
NO_KEY = -(2**63)
_LOW = 0xFFFFFFFF


def score_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys int64 of scores of any float dtype and the ids that they belong to, of a shape that broadcasts.

    NaN counts as infinity, so that a row that has one knows it by its largest key; -0 and 0 are equal.
    """
    bits = scores.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.long() << 32) + (_LOW - ids.long())


def key_scores(keys: Tensor) -> Tensor:
    """The scores float32 of keys; NaN of `NO_KEY`."""
    order = (keys >> 32).int()
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)


def key_ids(keys: Tensor) -> Tensor:
    """The ids int32 of keys; -1 of `NO_KEY`."""
    return (_LOW - (keys & _LOW)).int()


def _best_cost(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int, *, workload: Workload
) -> Cost:
    # As of `gumbel_sample`: twelve integer operations, a division and two logarithms make the score of one id.
    read = logits.nbytes + temperatures.nbytes + seeds.nbytes + steps.nbytes
    return Cost(flops=16 * logits.numel(), read=read, written=8 * logits.shape[0])


def _best_meta(logits: Tensor, *_: Tensor | int) -> Tensor:
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int64, device="meta")


@operation(_best_cost, meta=_best_meta)
def best_in_shard(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    """The best sum of logit and noise among a rank's ids, and its id, as keys [rows, 1] int64: see `score_keys`.

    logits [rows, part] of ids [first, first + part), of any float dtype; temperatures, seeds and steps [rows] as
    `gumbel_sample` takes them, whose noise it is. `NO_KEY` where the part has no ids.
    """
    if not logits.shape[1]:
        return torch.full((len(logits), 1), NO_KEY, device=logits.device)
    noise = gumbel_noise(seeds, steps, logits.shape[1], first)
    scores, ids = (scaled(logits, temperatures) + noise.masked_fill((temperatures == 0)[:, None], 0)).max(-1, True)
    return score_keys(scores, ids + first)


@best_in_shard.implement("torch", "cpu", invariant=True)
def _best_cpu(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    if logits.shape[1] and not bool(temperatures.any()):
        scores, ids = logits.max(-1, True)
        return score_keys(scores, ids + first)
    return best_in_shard.reference(logits, temperatures, seeds, steps, first)  # type: ignore[no-any-return]


def _choice_cost(keys: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=keys.numel(), read=keys.nbytes, written=4 * keys.shape[0])


def _choice_meta(keys: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[0], dtype=torch.int32, device="meta")


@operation(_choice_cost, meta=_choice_meta)
def best_of_shards(keys: Tensor) -> Tensor:
    """The id of the best key of each row: keys [rows, parts] int64 -> ids [rows] int32, the lowest among equals.

    `NO_ID` where the best score is not finite, so the row is no distribution, whichever part knows it.
    """
    best = keys.amax(-1)
    return torch.where(key_scores(best).isfinite(), key_ids(best), NO_ID)


best_of_shards.by_definition("cpu", invariant=True)


@jit
def gumbel_shard_kernel(best, best_id, keys, blocks, BLOCKS: tl.constexpr):
    """The key of the best of the blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    values = tl.load(best + row * blocks + block, mask=block < blocks, other=-float("inf"))
    value, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    id = tl.load(best_id + row * blocks + index).to(tl.int64)
    tl.store(keys + row, (score_order(value + 0.0) << 32) + (0xFFFFFFFF - id))


@jit
def best_of_shards_kernel(keys, result, rows, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The ids of ROWS rows, -1 (NO_ID) where the best score is not finite."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    held = (row < rows)[:, None] & (part < parts)[None, :]
    found = tl.load(keys + row[:, None] * parts + part[None, :], mask=held, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(found, 1)
    order = best >> 32
    id = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    finite = (order > LEAST) & (order < MOST)
    tl.store(result + row, tl.where(finite, id, -1).to(tl.int32), mask=row < rows)


# Of -inf and inf, as `score_order` says.
LEAST, MOST = constant((0xFF800000 ^ 0x7FFFFFFF) - 2**32), constant(0x7F800000)
_CHOICE_ROWS = 32


def _best_triton(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    rows, part = logits.shape
    if not part:
        return torch.full((rows, 1), NO_KEY, device=logits.device)
    keys = torch.empty((rows, 1), dtype=torch.int64, device=logits.device)
    if rows:
        best, best_id = best_of_blocks(logits, temperatures, seeds, steps, None, first)
        blocks = best.shape[1]
        gumbel_shard_kernel[(rows,)](best, best_id, keys, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)
    return keys


def _choice_triton(keys: Tensor) -> Tensor:
    rows, parts = keys.shape
    keys = keys.contiguous()
    result = torch.empty(rows, dtype=torch.int32, device=keys.device)
    if rows:
        best_of_shards_kernel[(ceil_div(rows, _CHOICE_ROWS),)](
            keys, result, rows, parts, ROWS=_CHOICE_ROWS, PARTS=next_power_of_2(parts), num_warps=1
        )
    return result


best_in_shard.in_triton(_best_triton, invariant=True, kernels=(gumbel_blocks_kernel, gumbel_shard_kernel))
best_of_shards.in_triton(_choice_triton, invariant=True, kernels=(best_of_shards_kernel,))


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


def logprobs_in_shard(logits: Tensor, ids: Tensor, top: int, first: int) -> Tensor:
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


def logprobs_of_shards(found: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
