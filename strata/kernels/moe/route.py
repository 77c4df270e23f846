"""Routing of tokens to experts: the likeliest of a softmax (Shazeer et al. 2017, Jiang et al. 2024)."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation

_INDEX_BYTES = 8


def _cost(logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool, *, workload: Workload) -> Cost:
    tokens, count = logits.shape
    # The softmax: a subtraction, an exponential, a sum and a division. Normalizing: a sum and a division.
    flops = 4 * tokens * count + (0 if bias is None else tokens * count) + (2 * tokens * per_token if normalized else 0)
    width = torch.promote_types(logits.dtype, torch.float32).itemsize
    read = logits.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(flops, read, tokens * per_token * (width + _INDEX_BYTES))


def _meta(logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], per_token)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=wide, device="meta"), logits.new_empty(shape, dtype=torch.int64, device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def route(logits: Tensor, bias: Tensor | None, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The `per_token` likeliest experts of each token and their weights.

    logits: [tokens, experts]. bias: [experts] float32, added to the probabilities for the choice only (DeepSeek-V3,
    section 2.1.2), or None. normalized: whether the weights of a token are divided by their sum.
    Returns weights [tokens, per_token] float32 (float64 for float64 logits), the softmax over all experts is of that
    dtype; and chosen [tokens, per_token] int64, the likeliest first. Differentiable through the weights.
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if bias is None:
        weights, chosen = probabilities.topk(per_token, dim=-1)
    else:
        chosen = (probabilities.detach() + bias).topk(per_token, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
    if normalized:
        # Column by column: the order of the sum does not depend on the number of tokens.
        weights = weights / reduce(add, weights.unbind(-1))[:, None]
    return weights, chosen


for _device in ("cpu", "cuda"):
    route.implement("torch", _device, invariant=True, differentiable=True)(route.reference)
