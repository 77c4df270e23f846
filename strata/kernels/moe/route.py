"""Routing of tokens to experts: the likeliest of a softmax (Shazeer et al. 2017, Jiang et al. 2024), or the best of
independent scores, of some groups of experts alone (DeepSeek-V2 and -V3, 2024).

`route` on CUDA in one launch: scores, groups, choice and weights of a token, of one warp.

Scores are chosen by as integers in the order of floats, in which every NaN is one number: whatever logits hold, an
expert is taken once, and one that there is.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl

# More of either would not stay in the registers of a warp.
MAX_EXPERTS, MAX_PER_TOKEN = 1024, 16
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
def _keys_within_groups(
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
        key = _keys_within_groups(key, GROUPS, KEPT, TOP2, PADDED, WIDTH, TAKEN)
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


_INDEX_BYTES = 8


class ExpertChoice(NamedTuple):
    """How experts are scored and chosen, where it is not the softmax over all.

    scoring: "sigmoid" scores each expert by itself. groups: experts stand in so many groups of neighbours, of which
    `kept` are chosen from. group_score: of a group that of its best expert ("max", DeepSeek-V2), or the sum of its best
    two ("top2", DeepSeek-V3). scale: what the weights are multiplied by in the end.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    scale: float = 1.0


SOFTMAX = ExpertChoice()


def _cost(
    logits: Tensor,
    bias: Tensor | None,
    per_token: int,
    normalized: bool,
    choice: ExpertChoice = SOFTMAX,
    *,
    workload: Workload,
) -> Cost:
    tokens, count = logits.shape
    # The softmax: a subtraction, an exponential, a sum and a division; a sigmoid: a negation instead of the first.
    # Normalizing: a sum and a division. A group's score: a comparison for each expert, or two.
    flops = 4 * tokens * count + (0 if bias is None else tokens * count) + (2 * tokens * per_token if normalized else 0)
    if choice.groups > 1:
        flops += (1 if choice.group_score == "max" else 2) * tokens * count
    if choice.scale != 1:
        flops += tokens * per_token
    width = torch.promote_types(logits.dtype, torch.float32).itemsize
    read = logits.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(flops, read, tokens * per_token * (width + _INDEX_BYTES))


def _meta(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], per_token)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=wide, device="meta"), logits.new_empty(shape, dtype=torch.int64, device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def route(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    """The `per_token` best experts of each token and their weights.

    logits: [tokens, experts]. bias: [experts] float32, added to the scores for the choice only (DeepSeek-V3, section
    2.1.2), or None. normalized: whether the weights of a token are divided by their sum. choice: see there; `groups`
    divides the experts, and the groups that are kept have at least `per_token`.
    Returns weights [tokens, per_token] float32 (float64 for float64 logits), the scores are of that dtype; and chosen
    [tokens, per_token] int64, the best first. Differentiable through the weights.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    by_itself = choice.scoring == "sigmoid"
    scores = logits.to(wide).sigmoid() if by_itself else logits.softmax(-1, dtype=wide)
    return _choose(scores, bias, per_token, normalized, choice)


def _choose(
    scores: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """`route` from scores on."""
    if bias is None and choice.groups == 1:
        weights, chosen = scores.topk(per_token, dim=-1)
    else:
        wanted = scores.detach() if bias is None else scores.detach() + bias
        chosen = _within_groups(wanted, choice).topk(per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
    if normalized:
        # Column by column: the order of the sum does not depend on the number of tokens. Sigmoids may all be 0.
        total = reduce(add, weights.unbind(-1))[:, None]
        weights = weights / (total + 1e-20 if choice.scoring == "sigmoid" else total)
    return weights if choice.scale == 1 else weights * choice.scale, chosen


def _within_groups(scores: Tensor, choice: ExpertChoice) -> Tensor:
    """Scores [tokens, experts] with -inf for the experts of groups that are not kept."""
    if choice.groups == 1:
        return scores
    grouped = scores.unflatten(-1, (choice.groups, -1))
    of_groups = grouped.amax(-1) if choice.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, of_groups.topk(choice.kept, dim=-1).indices, True)
    within: Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return within


def _fits(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice = SOFTMAX
) -> bool:
    count = logits.shape[1]
    groups = choice.groups
    # Powers of two hold the groups and the experts of one; two are added up only where there are two.
    lanes = next_power_of_2(groups) * next_power_of_2(count // groups)
    is_divided = groups == 1 or (count % groups == 0 and count // groups >= (2 if choice.group_score == "top2" else 1))
    return (
        logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits.stride(1) == 1
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and 1 <= per_token <= min(count, MAX_PER_TOKEN)
        and lanes <= MAX_EXPERTS
        and is_divided
        and choice.kept <= groups
    )


def in_one_launch(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    """By a kernel of our own; of equal scores the expert of the lower number comes first."""
    tokens, count = logits.shape
    weights = torch.empty((tokens, per_token), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, per_token), dtype=torch.int64, device=logits.device)
    groups = choice.groups
    known: dict[str, Any] = {"COUNT": count, "K": per_token, "NORMALIZED": normalized, "TAKEN": TAKEN}
    known |= {"SIGMOID": choice.scoring == "sigmoid", "GROUPS": groups, "KEPT": choice.kept}
    known |= {"TOP2": choice.group_score == "top2", "SLOTS": next_power_of_2(per_token)}
    known |= {"PADDED": next_power_of_2(groups), "WIDTH": next_power_of_2(count // groups)}
    if tokens:
        stride, scale = logits.stride(0), float(choice.scale)
        route_kernel[(tokens,)](logits, bias, weights, chosen, stride, scale, **known, num_warps=1)
    return weights, chosen


route.by_definition("cpu", differentiable=True)
route.in_triton(in_one_launch, invariant=True, supports=_fits, kernels=(route_kernel,))
route.by_definition("cuda", invariant=True, differentiable=True)


@route.implement("whole vectors", "cpu", invariant=True)
def _whole_vectors(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: ExpertChoice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    by_itself = choice.scoring == "sigmoid"
    scores = in_whole_vectors(wide, Tensor.sigmoid_) if by_itself else wide.softmax(-1)
    return _choose(scores, bias, per_token, normalized, choice)
