"""Routing of tokens to experts: the likeliest of a softmax (Shazeer et al. 2017, Jiang et al. 2024), or the best of
independent scores, of some groups of experts alone (DeepSeek-V2 and -V3, 2024).
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.moe.route_triton import MOST_EXPERTS, MOST_PER_TOKEN, TAKEN, route_kernel
from strata.kernels.op import operation

_INDEX_BYTES = 8


class Choice(NamedTuple):
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


SOFTMAX = Choice()


def _cost(
    logits: Tensor,
    bias: Tensor | None,
    per_token: int,
    normalized: bool,
    choice: Choice = SOFTMAX,
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
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], per_token)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=wide, device="meta"), logits.new_empty(shape, dtype=torch.int64, device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def route(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice = SOFTMAX
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
    scores: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice
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


def _within_groups(scores: Tensor, choice: Choice) -> Tensor:
    """Scores [tokens, experts] with -inf for the experts of groups that are not kept."""
    if choice.groups == 1:
        return scores
    grouped = scores.unflatten(-1, (choice.groups, -1))
    of_groups = grouped.amax(-1) if choice.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, of_groups.topk(choice.kept, dim=-1).indices, True)
    within: Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return within


def _fits(logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice = SOFTMAX) -> bool:
    count = logits.shape[1]
    groups = choice.groups
    # Powers of two hold the groups and the experts of one; two are added up only where there are two.
    lanes = next_power_of_2(groups) * next_power_of_2(count // groups)
    is_divided = groups == 1 or (count % groups == 0 and count // groups >= (2 if choice.group_score == "top2" else 1))
    return (
        logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and logits.stride(1) == 1
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and 1 <= per_token <= min(count, MOST_PER_TOKEN)
        and lanes <= MOST_EXPERTS
        and is_divided
        and choice.kept <= groups
    )


def in_one_launch(
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice = SOFTMAX
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
    logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, choice: Choice = SOFTMAX
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    by_itself = choice.scoring == "sigmoid"
    scores = in_whole_vectors(wide, Tensor.sigmoid_) if by_itself else wide.softmax(-1)
    return _choose(scores, bias, per_token, normalized, choice)
