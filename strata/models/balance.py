"""Keeping experts equally busy: the balancing loss (Fedus et al. 2022), or a bias on the choice (DeepSeek-V3, 2024)."""

# A call of an operation is untyped.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from torch import Tensor, nn

from strata.kernels.moe.balance import balance_routing
from strata.models.experts import ExpertRouter


class Balance(nn.Module):
    """What a router in training carries: totals of what it did, and how the balancing loss pulls at it.

    totals: [2, experts] float64, see `balance_routing`, which every backward pass adds to. slopes: [experts] float64 or
    None, see there. Both are memory of whoever balances, and no part of the model that is saved.
    """

    totals: Tensor
    slopes: Tensor | None

    def __init__(self, totals: Tensor, slopes: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("totals", totals, persistent=False)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, weights: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        return balance_routing(weights, chosen, logits, self.totals, self.slopes)


def routers(model: nn.Module) -> dict[str, ExpertRouter]:
    """By name, in the order of the layers. model: whole, or the stages of a rank."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertRouter)}


def hold_biases(model: nn.Module) -> None:
    """Let the biases of routers, which no gradient moves, be no parameters of `model`: it is to be trained."""
    for router in routers(model).values():
        router.hold_bias()


def fractions(counts: Tensor, per_token: int) -> Tensor:
    """The fraction of the tokens that each expert got: its counts [..., experts] over the tokens, which chose
    `per_token` experts each. Zeros without tokens.
    """
    return counts * per_token / counts.sum(-1, keepdim=True).clamp(min=1)


def balancing_loss(fractions: Tensor, mean_probabilities: Tensor) -> Tensor:
    """[], experts * sum_e fraction_e * mean probability_e of each layer, averaged over the layers; from
    [layers, experts]. It is per_token where all experts are equally busy.

    Each layer is balanced by itself, as in the paper. In a model with one layer of experts it is the loss of
    transformers, which otherwise adds layers up first, so that an expert idle in one may hide behind its namesake in
    another; `ExpertsConfig.balance_weight` weighs both alike.
    """
    layers, experts = fractions.shape
    return experts * (fractions * mean_probabilities).sum() / layers


def balancing_slopes(fractions: Tensor, tokens: Tensor, weight: float) -> Tensor:
    """[layers, experts]: the gradient of `weight * balancing_loss` with respect to each probability of any of `tokens`,
    [], tokens. None flows through fractions, which are counts.
    """
    layers, experts = fractions.shape
    return fractions * (weight * experts / layers) / tokens
