"""The search for the bounds of top-k, top-p and min-p on CUDA: one program a row, by pivots instead of a sort.

A full row is passed over a few times: once for its largest logit, then with three pivots at a time until few logits are
left between what surely stays and what surely goes. Those are put aside, and the border is found among them to the last
bit. Qrita (arXiv 2602.01518) has the idea of pivots.

Probabilities as whole numbers, so that what top-p adds up comes out the same on every device, in any order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.triton_import import jit, tl

# 2^x on [0, 1) as a polynomial, the coefficient of x first, all exact in float32: relative error 1e-7.
POWER = (
    0.6931470632553101,
    0.2402293086051941,
    0.055485282093286514,
    0.009675451554358006,
    0.0012467843480408192,
    0.00021612923592329025,
)
LOG2_E = 1.4426950216293335
# The probability of a row's likeliest id has this many bits, so that of an id more than 28 below it is 0.
PROBABILITY_BITS = 40
ZERO_BELOW = 28.0


def integer_probabilities(below: Tensor) -> Tensor:
    """How likely ids are beside the likeliest of their row, as whole numbers: e^below * 2^40, int64.

    below: float32, at most 0: how far each logit lies under the largest. Sums of whole numbers are exact, and every
    operation here is correctly rounded in float32, so no device and no order of summation can move the border of top-p.
    """
    power = below.clamp(min=-64.0) * LOG2_E
    whole = power.floor()
    fraction = power - whole
    value = fraction * POWER[5] + POWER[4]
    for coefficient in (*POWER[3::-1], 1.0):
        value = value * fraction + coefficient
    return ((value * 2.0**23).long() << (PROBABILITY_BITS - 23)) >> (-whole).long().clamp(0, 62)


# Ids that are looked at together; no more of them are kept aside for the end of a search.
_BLOCK = 4096
_WARPS = 16
# Passes over a whole row that close in on the border before an exact bisection, which always ends, takes over.
_MAX_PASSES = 16
_CONSTANTS: dict[str, object] = {
    "POWER": POWER,
    "LOG2_E": LOG2_E,
    "ZERO_BELOW": ZERO_BELOW,
    "MAX_PASSES": _MAX_PASSES,
    "BLOCK": _BLOCK,
}


@jit
def score_order(value):
    """float32 as int64 in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@jit
def _value(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@jit
def _scores(source, at, length, temperature):
    """A block of scaled logits, -inf beyond the row; -0 becomes 0, so that equal numbers have equal keys."""
    value = tl.load(source + at, mask=at < length, other=-float("inf")).to(tl.float32)
    return tl.div_rn(value, temperature) + 0.0


@jit
def _probability(below, POWER: tl.constexpr, LOG2_E: tl.constexpr):
    """The arithmetic of `integer_probabilities`; the kernel is compiled without fusing products and sums."""
    power = tl.maximum(below, -64.0) * LOG2_E
    whole = tl.floor(power)
    part = power - whole
    value = part * POWER[5] + POWER[4]
    value = value * part + POWER[3]
    value = value * part + POWER[2]
    value = value * part + POWER[1]
    value = value * part + POWER[0]
    value = value * part + 1.0
    mantissa = (value * 8388608.0).to(tl.int32).to(tl.int64) << 17
    return mantissa >> tl.minimum(-whole, 62.0).to(tl.int64)


@jit
def _weigh(
    source, length, temperature, top, a, b, c,
    MASS: tl.constexpr, POWER: tl.constexpr, LOG2_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many scores reach each of the pivots a <= b <= c; then their probability if MASS, else these counts again."""
    lane = tl.arange(0, BLOCK)
    count_a = tl.zeros((BLOCK,), tl.int32)
    count_b = tl.zeros((BLOCK,), tl.int32)
    count_c = tl.zeros((BLOCK,), tl.int32)
    mass_a = tl.zeros((BLOCK,), tl.int64)
    mass_b = tl.zeros((BLOCK,), tl.int64)
    mass_c = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, length, BLOCK):
        score = _scores(source, first + lane, length, temperature)
        count_a += (score >= a).to(tl.int32)
        count_b += (score >= b).to(tl.int32)
        count_c += (score >= c).to(tl.int32)
        if MASS:
            mass = _probability(score - top, POWER, LOG2_E)
            mass_a += tl.where(score >= a, mass, 0)
            mass_b += tl.where(score >= b, mass, 0)
            mass_c += tl.where(score >= c, mass, 0)
    ids_a = tl.sum(count_a, 0).to(tl.int64)
    ids_b = tl.sum(count_b, 0).to(tl.int64)
    ids_c = tl.sum(count_c, 0).to(tl.int64)
    if MASS:
        return ids_a, ids_b, ids_c, tl.sum(mass_a, 0), tl.sum(mass_b, 0), tl.sum(mass_c, 0)
    return ids_a, ids_b, ids_c, ids_a, ids_b, ids_c


@jit
def _search(
    source, length, temperature, top, low, high, wanted, beyond,
    MASS: tl.constexpr, POWER: tl.constexpr, LOG2_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest number from `low` to below `high` that scores of weight `wanted` reach; `low` if none is.

    beyond: the weight of scores from `high` on, if `source` does not hold them. Each pass over `source` leaves a
    fourth of the numbers between.
    """
    first = score_order(low)
    end = score_order(high)
    while end - first > 1:
        span = end - first
        a = first + tl.maximum(span // 4, 1)
        b = first + tl.maximum(span // 2, 1)
        c = first + tl.maximum(span * 3 // 4, 1)
        _, _, _, at_a, at_b, at_c = _weigh(
            source, length, temperature, top, _value(a), _value(b), _value(c), MASS, POWER, LOG2_E, BLOCK
        )
        if at_c + beyond >= wanted:
            first = c
        elif at_b + beyond >= wanted:
            first = b
            end = c
        elif at_a + beyond >= wanted:
            first = a
            end = b
        else:
            end = a
    return _value(first)


@jit
def _enclose(
    source, length, temperature, top, low, high, wanted, inside, MAX_PASSES: tl.constexpr,
    POWER: tl.constexpr, LOG2_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw `low` and `high` together around the number that scores of mass `wanted` reach, until BLOCK scores are left.

    inside: how many there are at first. Returns low, high, the mass of scores from `high` on, and how many are inside.
    """
    beyond = tl.full((), 0, tl.int64)
    below = inside  # scores from `low` on
    above = tl.full((), 0, tl.int64)  # and from `high` on
    passes = 0
    while (below - above > BLOCK) & (passes < MAX_PASSES):
        step = (high - low) * 0.25
        a = low + step
        b = low + 2 * step
        c = low + 3 * step
        ids_a, ids_b, ids_c, at_a, at_b, at_c = _weigh(
            source, length, temperature, top, a, b, c, True, POWER, LOG2_E, BLOCK
        )
        if at_c >= wanted:
            low = c
            below = ids_c
        elif at_b >= wanted:
            low = b
            below = ids_b
            high = c
            beyond = at_c
            above = ids_c
        elif at_a >= wanted:
            low = a
            below = ids_a
            high = b
            beyond = at_b
            above = ids_b
        else:
            high = a
            beyond = at_a
            above = ids_a
        passes += 1
    return low, high, beyond, below - above


@jit
def _largest_of_lanes(source, length, temperature, BLOCK: tl.constexpr):
    """The largest score of each BLOCKth of a row, [BLOCK]."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, length, BLOCK):
        largest = tl.maximum(largest, _scores(source, first + lane, length, temperature))
    return largest


@jit
def _gather(source, length, temperature, low, high, target, BLOCK: tl.constexpr):
    """Put the first BLOCK scores from `low` to below `high` into `target`; returns how many there are."""
    lane = tl.arange(0, BLOCK)
    found = 0
    tl.debug_barrier()  # `target` may still be read
    for first in range(0, length, BLOCK):
        score = _scores(source, first + lane, length, temperature)
        inside = (score >= low) & (score < high)
        count = tl.sum(inside.to(tl.int32), 0)
        if count > 0:
            index = found + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(target + index, score, mask=inside & (index < BLOCK))
        found += count
    tl.debug_barrier()
    return found


@jit
def _id_of_equal(source, length, temperature, value, number, BLOCK: tl.constexpr):
    """The id of the `number`th score (from 1) that equals `value`."""
    lane = tl.arange(0, BLOCK)
    result = length
    seen = number * 0
    for first in range(0, length, BLOCK):
        equal = _scores(source, first + lane, length, temperature) == value
        count = tl.sum(equal.to(tl.int32), 0)
        if (seen < number) & (number <= seen + count):
            index = seen + tl.cumsum(equal.to(tl.int32), 0)
            result = tl.max(tl.where(equal & (index == number), first + lane, 0), 0)
        seen += count
    return result


@jit
def _lowest_within(top, floor):
    """The smallest number whose distance from `top`, rounded to float32, is not under `floor`."""
    end = score_order(top)
    first = score_order(tl.full((), -float("inf"), tl.float32)) - 1
    while end - first > 1:
        middle = first + (end - first) // 2
        if _value(middle) - top >= floor:
            end = middle
        else:
            first = middle
    return _value(end)


# The parameters of a step are views of one buffer, at any address; the rows of an odd vocabulary begin anywhere.
@partial(jit, unspecialized=("logits", "temperatures", "top_k", "top_p", "min_p", "row_stride"))
def filter_bounds_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    aside,
    lowest,
    last,
    vocab,
    row_stride,
    POWER: tl.constexpr,
    LOG2_E: tl.constexpr,
    ZERO_BELOW: tl.constexpr,
    MAX_PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [rows], done at once with a row that is not filtered. aside: [rows, BLOCK] float32 for their own use.

    Leaves lowest and last, [rows], as `filter_bounds` says.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    ratio = tl.load(min_p + row)
    tl.store(lowest + row, -float("inf"))
    tl.store(last + row, vocab)
    if (temperature == 0) | ((k <= 0) & (p >= 1) & (ratio <= 0)):
        return
    logits += row * row_stride
    aside += row * BLOCK
    largest = _largest_of_lanes(logits, vocab, temperature, BLOCK)
    top = tl.max(largest, 0)
    if (top == float("inf")) | (top == -float("inf")):
        return
    one = tl.full((), 1.0, tl.float32)
    beyond = tl.full((), 0, tl.int64)
    high = _value(score_order(top) + 1)
    border = _lowest_within(top, tl.log(ratio.to(tl.float64)).to(tl.float32))
    limit = vocab
    held = tl.full((), BLOCK + 1, tl.int32)  # scores in `aside`; over BLOCK: not all that matter

    if (k > 0) & (k < vocab):
        wanted = k.to(tl.int64)
        low = border
        if k <= BLOCK:
            # The kth largest of these maxima is at most the kth largest of the row, and seldom far below it.
            tl.store(aside + tl.arange(0, BLOCK), largest)
            tl.debug_barrier()
            low = _search(aside, BLOCK, one, top, low, high, wanted, beyond, False, POWER, LOG2_E, BLOCK)
        held = _gather(logits, vocab, temperature, low, high, aside, BLOCK)
        if held <= BLOCK:
            border = _search(aside, held, one, top, low, high, wanted, beyond, False, POWER, LOG2_E, BLOCK)
        else:
            border = _search(logits, vocab, temperature, top, low, high, wanted, beyond, False, POWER, LOG2_E, BLOCK)

    if p < 1:
        low = tl.maximum(border, top - ZERO_BELOW)
        if held <= BLOCK:
            _, _, _, total, _, _ = _weigh(aside, held, one, top, low, low, low, True, POWER, LOG2_E, BLOCK)
            wanted = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        else:
            inside, _, _, total, _, _ = _weigh(
                logits, vocab, temperature, top, low, low, low, True, POWER, LOG2_E, BLOCK
            )
            wanted = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            low, high, beyond, inside = _enclose(
                logits, vocab, temperature, top, low, high, wanted, inside, MAX_PASSES, POWER, LOG2_E, BLOCK
            )
            if inside <= BLOCK:
                held = _gather(logits, vocab, temperature, low, high, aside, BLOCK)
        if held <= BLOCK:
            border = _search(aside, held, one, top, low, high, wanted, beyond, True, POWER, LOG2_E, BLOCK)
            after = _value(score_order(border) + 1)
            reach, above, _, _, over, _ = _weigh(
                aside, held, one, top, border, after, after, True, POWER, LOG2_E, BLOCK
            )
            over += beyond
        else:
            none = tl.full((), 0, tl.int64)
            border = _search(logits, vocab, temperature, top, low, high, wanted, none, True, POWER, LOG2_E, BLOCK)
            after = _value(score_order(border) + 1)
            reach, above, _, _, over, _ = _weigh(
                logits, vocab, temperature, top, border, after, after, True, POWER, LOG2_E, BLOCK
            )
        each = _probability(border - top, POWER, LOG2_E)
        equals = (wanted - over + each - 1) // each
        if equals < reach - above:
            limit = _id_of_equal(logits, vocab, temperature, border, equals.to(tl.int32), BLOCK)
    tl.store(lowest + row, border)
    tl.store(last + row, limit)


def search_bounds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """`filter_bounds` in one launch that the host does not wait for."""
    rows, vocab = logits.shape
    lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, dtype=torch.int32, device=logits.device)
    aside = torch.empty((rows, _BLOCK), dtype=torch.float32, device=logits.device)
    if rows:
        filter_bounds_kernel[(rows,)](
            logits,
            temperatures,
            top_k,
            top_p,
            min_p,
            aside,
            lowest,
            last,
            vocab,
            logits.stride(0),
            **_CONSTANTS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return lowest, last
