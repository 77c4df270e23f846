"""From logits to ids: penalties, sampling by Gumbel noise, and log-probabilities. One row a sequence; the filters
(top-k, top-p, min-p) are in `filters`.

The functions here work on all rows at once, with one parameter a row, and never wait for the device. What a row becomes
does not depend on the other rows.
"""

from __future__ import annotations

from functools import partial
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import constant, jit, libdevice, tl

# What is drawn from a row that is no distribution.
NO_ID = -1


def penalize(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make what has been said less likely, as vLLM does.

    logits [rows, vocab] float32; output_counts [rows, vocab]: how often each id stands in the output so far;
    prompt_mask [rows, vocab] bool: whether it stands in the prompt; repetition, presence, frequency [rows] float32.
    The logit of an id in prompt or output is divided by `repetition` if positive, else multiplied by it (Keskar et al.
    2019); then `frequency` times its count in the output is subtracted, and `presence` if it is there at all.
    """
    in_output = output_counts > 0
    factor = torch.where(prompt_mask | in_output, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * in_output


def scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [rows, vocab] in float32, divided by the temperatures [rows] float32; a row of temperature 0 is left."""
    return logits.float() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]


Bounds = tuple[Tensor, Tensor]  # what `filter_bounds` leaves of each row


def _gumbel_cost(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    steps: Tensor,
    bounds: Bounds | None = None,
    *,
    workload: Workload,
) -> Cost:
    # About twelve integer operations, a division and two logarithms make the score of one id.
    read = sum(parameter.nbytes for parameter in (logits, temperatures, seeds, steps, *(bounds or ())))
    return Cost(flops=16 * logits.numel(), read=read, written=4 * logits.shape[0])


def _gumbel_meta(logits: Tensor, *_: Tensor | Bounds | None) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32, device="meta")


@operation(_gumbel_cost, meta=_gumbel_meta)
def gumbel_sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, bounds: Bounds | None = None
) -> Tensor:
    """Draw an id from the softmax of each row: the largest sum of logit and Gumbel noise (Gumbel 1954).

    logits [rows, vocab] of any float dtype, `-inf` for what may not be drawn; temperatures [rows] float32 divide them,
    0 takes the largest logit; seeds [rows] int64; steps [rows] int32 or int64, how many draws the seed has behind it;
    bounds: what `filter_bounds` leaves of each row, None for all of it. Returns ids [rows] int32, the lowest
    among equals. The noise of an id is a hash of (seed, step, id), so the same draw gives the same id in any batch.

    A row that is no distribution, because it holds NaN or infinity or nothing above -inf, gives `NO_ID`.
    """
    scores = scaled(logits, temperatures)
    if bounds is not None:
        scores = scores.masked_fill(ruled_out(scores, *bounds), -torch.inf)
    noise = gumbel_noise(seeds, steps, logits.shape[1])
    return likeliest(scores + noise.masked_fill((temperatures == 0)[:, None], 0))


@gumbel_sample.implement("torch", "cpu", invariant=True)
def _gumbel_cpu(logits: Tensor, temperatures: Tensor, *rest: Tensor | Bounds | None) -> Tensor:
    if not bool(temperatures.any()):
        return likeliest(logits)
    return gumbel_sample.reference(logits, temperatures, *rest)  # type: ignore[no-any-return]


def ruled_out(scores: Tensor, lowest: Tensor, last: Tensor) -> Tensor:
    """Which of scaled logits [rows, vocab] are below the bounds that `filter_bounds` found. NaN never is."""
    ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return (scores < lowest[:, None]) | ((scores == lowest[:, None]) & (ids > last[:, None]))


def likeliest(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, the lowest among equals, or `NO_ID`: [rows, vocab] -> [rows] int32."""
    values, ids = logits.max(-1)  # the largest of a row with NaN is NaN; on a CPU this takes a fourth of argmax's time
    return torch.where(values.isfinite(), ids, NO_ID).int()


def gumbel_noise(seeds: Tensor, steps: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise [rows, vocab] float32 of each (seed, step, id); first: the id of the first column."""
    keys = _mix64(_mix64(seeds) + steps)
    low = keys.int()[:, None]
    high = (keys >> 32).int()[:, None]
    ids = torch.arange(first, first + vocab, dtype=torch.int32, device=seeds.device) * _GOLDEN32
    # The finalizer of MurmurHash3 (Appleby 2011), with one half of the key before it and one half inside.
    bits = ids ^ low
    bits ^= (bits >> 16) & 0xFFFF
    bits.mul_(_MURMUR_1).add_(high)
    bits ^= (bits >> 13) & 0x7FFFF
    bits.mul_(_MURMUR_2)
    bits ^= (bits >> 16) & 0xFFFF
    # A uniform number in (0, 1), finest near 0, and by its logarithm an exponential variable: the likeliest winners are
    # the smallest, where float32 is dense.
    uniform = ((bits >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(_UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_()


_GOLDEN32 = -0x61C88647  # 2^32 / golden ratio, as int32: odd, so that ids spread over all bits
_MURMUR_1 = -0x7A143595
_MURMUR_2 = -0x3D4D51CB
_UNIT = (1 - 2.0**-24) * 2.0**-31  # keeps the largest uniform number below 1


_LN2 = constant(log(2))
_GUMBEL_BLOCK = 2048
GUMBEL_CONSTANTS: dict[str, object] = {"UNIT": _UNIT, "BLOCK": _GUMBEL_BLOCK}
_TOKEN_BLOCK = 4096
# Ids of a row: for requests, which ask for 21 at most, the kernel is compiled once.
_TOKEN_IDS = 32


def _mix64(x: Tensor) -> Tensor:
    """The mixing function of SplitMix64 (Steele et al. 2014) on int64, which wraps."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@jit
def _mix64_kernel(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# The parameters of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("temperatures", "seeds", "steps", "first_id"))
def gumbel_blocks_kernel(
    logits,
    temperatures,
    seeds,
    steps,
    lowest,
    last,
    best,
    best_id,
    vocab,
    row_stride,
    first_id,
    FILTERED: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best sum of logit and noise in each block of a row: the arithmetic of `gumbel_noise`, unsigned. NaN is best.

    first_id: of the first column; None: 0. FILTERED: only ids within the row's bounds compete.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    logit = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    # The quotient as a division rounds it (Markstein 1990), for a third of the work; infinities stay what they are.
    divisor = tl.where(temperature == 0, 1.0, temperature)
    inverse = tl.div_rn(1.0, divisor)
    quotient = logit * inverse
    corrected = tl.fma(tl.fma(-quotient, divisor, logit), inverse, quotient)
    score = tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)
    if first_id is not None:
        ids += first_id
    if FILTERED:
        border = tl.load(lowest + row)
        out = (score < border) | ((score == border) & (ids > tl.load(last + row)))
        score = tl.where(out, -float("inf"), score)
    if temperature != 0:
        key = _mix64_kernel(tl.load(seeds + row).to(tl.uint64))
        key = _mix64_kernel(key + tl.load(steps + row).to(tl.uint64))
        bits = (ids.to(tl.uint32) * 0x9E3779B9) ^ key.to(tl.uint32)
        bits ^= bits >> 16
        bits = bits * 0x85EBCA6B + (key >> 32).to(tl.uint32)
        bits ^= bits >> 13
        bits *= 0xC2B2AE35
        bits ^= bits >> 16
        uniform = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * UNIT
        # -log(1 - u), of which small values win: by its series where 1 - u would lose what u has.
        series = uniform * tl.fma(uniform, tl.fma(uniform, 1 / 3, 0.5), 1.0)
        exponential = tl.where(uniform < 2**-8, series, _LN2 * -tl.log2(1.0 - uniform))
        score -= _LN2 * tl.log2(exponential)
    score = tl.where(score != score, float("inf"), score)
    value, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, value)
    best_of_block = block * BLOCK + index
    if first_id is not None:
        best_of_block += first_id
    tl.store(best_id + at, best_of_block)


@jit
def gumbel_reduce_kernel(best, best_id, result, blocks, BLOCKS: tl.constexpr):
    """The best of the blocks of a row, -1 (NO_ID) if that is no finite score."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    values = tl.load(best + row * blocks + block, mask=block < blocks, other=-float("inf"))
    value, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    finite = (value > -float("inf")) & (value < float("inf"))
    tl.store(result + row, tl.where(finite, tl.load(best_id + row * blocks + index), -1))


def best_of_blocks(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    steps: Tensor,
    bounds: Bounds | None = None,
    first: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `gumbel_blocks_kernel` finds: scores float32 and ids int32, both [rows, blocks]. Neither may be none."""
    rows, vocab = logits.shape
    blocks = ceil_div(vocab, _GUMBEL_BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    gumbel_blocks_kernel[(rows, blocks)](
        logits,
        temperatures,
        seeds,
        steps,
        *(bounds or (None, None)),
        best,
        best_id,
        vocab,
        logits.stride(0),
        first,
        FILTERED=bounds is not None,
        **GUMBEL_CONSTANTS,
        num_warps=4,
    )
    return best, best_id


def _gumbel_triton(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, bounds: Bounds | None = None
) -> Tensor:
    rows = len(logits)
    result = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        best, best_id = best_of_blocks(logits, temperatures, seeds, steps, bounds)
        blocks = best.shape[1]
        gumbel_reduce_kernel[(rows,)](best, best_id, result, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)
    return result


gumbel_sample.in_triton(_gumbel_triton, invariant=True, kernels=(gumbel_blocks_kernel, gumbel_reduce_kernel))


def _token_cost(logits: Tensor, ids: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=3 * logits.numel(), read=logits.nbytes + ids.nbytes, written=4 * ids.numel())


def _token_meta(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.new_empty(ids.shape, dtype=torch.float32, device="meta")


@operation(_token_cost, meta=_token_meta)
def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of some ids of each row: logits [rows, vocab], ids [rows, n] -> [rows, n] float32."""
    return F.log_softmax(logits.float(), -1).gather(1, ids.long())


# ATen computes each row of a softmax over the last dimension by itself on CPU.
token_logprobs.by_definition("cpu", invariant=True)


# The rows of an odd vocabulary begin at any address, and a slice of rows does too.
@partial(jit, unspecialized=("logits", "row_stride", "ids", "id_count"))
def token_logprobs_kernel(logits, ids, result, vocab, row_stride, id_count, BLOCK: tl.constexpr, IDS: tl.constexpr):
    """One program a row: its sums run in an order that depends on the vocabulary only."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        values = tl.load(start + first + lane, mask=first + lane < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, values)
    top = tl.max(largest, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        values = tl.load(start + first + lane, mask=first + lane < vocab, other=-float("inf")).to(tl.float32)
        total += tl.exp(values - top)
    log_total = libdevice.log(tl.sum(total, 0))
    column = tl.arange(0, IDS)
    held = column < id_count
    wanted = tl.load(ids + row * id_count + column, mask=held, other=0)
    chosen = tl.load(start + wanted, mask=held, other=0.0).to(tl.float32)
    tl.store(result + row * id_count + column, chosen - top - log_total, mask=held)


def _token_triton(logits: Tensor, ids: Tensor) -> Tensor:
    rows, vocab = logits.shape
    ids = ids.contiguous()
    result = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if result.numel():
        padded = max(_TOKEN_IDS, next_power_of_2(ids.shape[1]))
        token_logprobs_kernel[(rows,)](
            logits, ids, result, vocab, logits.stride(0), ids.shape[1], BLOCK=_TOKEN_BLOCK, IDS=padded, num_warps=8
        )
    return result


token_logprobs.in_triton(_token_triton, invariant=True, kernels=(token_logprobs_kernel,))


def logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the model thought: of the chosen ids, and of the likeliest.

    logits [rows, vocab], ids [rows] -> log-probabilities of the ids [rows] float32, their ranks [rows] int32 (1 is the
    likeliest), the `top` likeliest ids [rows, top] int32 and their log-probabilities [rows, top] float32.
    """
    chosen = ids.long()[:, None]
    top_ids = logits.topk(min(top, logits.shape[1]), -1).indices
    found = token_logprobs(logits, torch.cat((chosen, top_ids), 1))
    ranks = (logits > logits.gather(1, chosen)).sum(-1, dtype=torch.int32) + 1
    return found[:, 0], ranks, top_ids.int(), found[:, 1:]
