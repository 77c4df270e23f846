"""`route` on CUDA in one launch: scores, groups, choice and weights of a token, of one warp.

Scores are chosen by as integers in the order of floats, in which every NaN is one number: whatever logits hold, an
expert is taken once, and one that there is.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.triton_import import jit, tl

# More of either would not stay in the registers of a warp.
MOST_EXPERTS, MOST_PER_TOKEN = 1024, 16
# Below the keys of all floats: of what is no expert, and of one that has been taken.
TAKEN = -(2**31)


@jit
def _key(value):
    """float32 as int32 in the same order, NaN above all numbers; never the least int32."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def _first_of_largest(keys, place, BEYOND: tl.constexpr):
    """Two reductions of 32 bits, an instruction each for a warp."""
    return tl.min(tl.where(keys == tl.max(keys, 0), place, BEYOND), 0)


@jit
def _within_groups(
    key,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    TAKEN: tl.constexpr,
):
    """Keys [PADDED * WIDTH] with that of -inf for the experts of groups that are not kept."""
    grouped = tl.reshape(key, (PADDED, WIDTH))
    best = tl.max(grouped, 1)
    if TOP2:
        place = tl.arange(0, WIDTH)[None, :]
        first = tl.min(tl.where(grouped == best[:, None], place, WIDTH), 1)
        second = tl.max(tl.where(place == first[:, None], TAKEN, grouped), 1)
        best = _key(_value(best) + _value(second))
    group = tl.arange(0, PADDED)
    best = tl.where(group < GROUPS, best, TAKEN)
    for _ in tl.static_range(KEPT):
        best = tl.where(group == _first_of_largest(best, group, PADDED), TAKEN, best)
    stays = (best == TAKEN)[:, None] | (grouped == TAKEN)
    return tl.reshape(tl.where(stays, grouped, _key(tl.full((PADDED, WIDTH), -float("inf"), tl.float32))), key.shape)


# Addresses too: how a row is divided among threads may not depend on where it begins.
@partial(jit, unspecialized=("logits", "bias", "weights", "chosen", "stride"))
def route_kernel(
    logits,
    bias,
    weights,
    chosen,
    stride,
    scale,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    TAKEN: tl.constexpr,
):
    """Programs [tokens]. PADDED, WIDTH, SLOTS: powers of two that hold the groups, the experts of one, and K."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED * WIDTH)
    in_group: tl.constexpr = COUNT // GROUPS
    expert = lane // WIDTH * in_group + lane % WIDTH
    exists = (lane % WIDTH < in_group) & (lane // WIDTH < GROUPS)
    logit = tl.load(logits + token * stride + expert, mask=exists, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(logit, 0))
        score = power / tl.sum(power, 0)
    wanted = score
    if bias is not None:
        wanted += tl.load(bias + expert, mask=exists, other=0.0)
    key = tl.where(exists, _key(wanted), TAKEN)
    if GROUPS > 1:
        key = _within_groups(key, GROUPS, KEPT, TOP2, PADDED, WIDTH, TAKEN)
    bits = score.to(tl.int32, bitcast=True)
    slot = tl.arange(0, SLOTS)
    numbers = tl.zeros((SLOTS,), tl.int32)
    values = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for one in tl.static_range(K):
        best = _first_of_largest(key, lane, PADDED * WIDTH)
        weight = tl.max(tl.where(lane == best, bits, TAKEN), 0).to(tl.float32, bitcast=True)
        total += weight  # in this order, as the reference adds columns
        values = tl.where(slot == one, weight, values)
        numbers = tl.where(slot == one, best // WIDTH * in_group + best % WIDTH, numbers)
        key = tl.where(lane == best, TAKEN, key)
    if NORMALIZED:
        values /= total + (1e-20 if SIGMOID else 0.0)
    tl.store(weights + token * K + slot, values * scale, mask=slot < K)
    tl.store(chosen + token * K + slot, numbers.to(tl.int64), mask=slot < K)
