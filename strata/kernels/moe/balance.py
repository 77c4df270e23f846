"""What balancing needs of a router in training: counts of its choices, and the gradient of the balancing loss.

Both happen in the backward pass, which runs once for every token even where the forward pass is computed again.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(
    weights: Tensor, chosen: Tensor, logits: Tensor, totals: Tensor, slopes: Tensor | None, *, workload: Workload
) -> Cost:
    return Cost(0, 0, 0)  # the forward pass hands on what it is given


@operation(_cost, mutates=("totals",))
def balance_routing(weights: Tensor, chosen: Tensor, logits: Tensor, totals: Tensor, slopes: Tensor | None) -> Tensor:
    """`weights` as they are. The backward pass adds to `totals`, and to the gradient of the logits.

    weights, chosen: [tokens, per_token], what `route` made of the logits [tokens, experts]. totals: [2, experts]
    float64, to which is added how often each expert was chosen, and the sum of its probabilities. slopes: [experts],
    the gradient of the balancing loss with respect to each probability of any token; None if there is no such loss.

    Tokens whose logits are all exactly zero are left out: they are the padding of sequence parallelism
    (`strata.parallel.tensor`), rows of zeros from the embedding on.
    """
    return _Balance.apply(weights, chosen, logits, totals, slopes)


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, chosen: Tensor, logits: Tensor, totals: Tensor, slopes: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(chosen, logits)
        ctx.totals, ctx.slopes = totals, slopes
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        chosen, logits = ctx.saved_tensors
        is_token = logits.ne(0).any(-1, keepdim=True)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        numbers = torch.arange(logits.shape[-1], device=logits.device)
        is_chosen = (chosen[..., None] == numbers).any(1) & is_token
        # Another view of the memory: what a recomputed layer was given may not change as far as autograd knows.
        totals = ctx.totals.data
        totals[0] += is_chosen.sum(0)
        totals[1] += (probabilities * is_token).sum(0, dtype=torch.float64)
        if ctx.slopes is None:
            return grads[0], None, None, None, None
        slopes = ctx.slopes.to(probabilities.dtype)
        of_logits = probabilities * (slopes - (probabilities * slopes).sum(-1, keepdim=True))
        return grads[0], None, of_logits.to(logits.dtype), None, None
