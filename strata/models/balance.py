"""Keeping experts equally busy: the balancing loss (Fedus et al. 2022), or a bias on the choice (DeepSeek-V3, 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strata.kernels.gemm import linear
from strata.models.experts import Router


@dataclass(frozen=True)
class Routing:
    """What the routers did with some tokens. Sums over tokens: those of several batches and ranks may be added up.

    counts: [layers with experts, experts] int64, how often each expert was chosen. probabilities: [layers, experts]
    float32 or float64, the sum of the softmax, through which gradients flow. tokens: how many there were, in one layer.
    """

    counts: Tensor
    probabilities: Tensor
    tokens: int


class RoutingObserver:
    """Collects from the routers while a model runs; see `observe_routing`."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._tokens = 0

    def routing(self) -> Routing:
        """Of the forward pass since `observe_routing` began."""
        return Routing(torch.stack(self._counts), torch.stack(self._probabilities), self._tokens)

    def see(self, router: nn.Module, arguments: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        """A forward hook of a router."""
        assert isinstance(router, Router)
        (x,), chosen = arguments, result[1].flatten()
        logits: Tensor = linear(x, router.weight, None)
        wide = torch.promote_types(logits.dtype, torch.float32)
        self._probabilities.append(logits.softmax(-1, dtype=wide).sum(0))
        zeros = chosen.new_zeros(router.weight.shape[0])
        self._counts.append(zeros.scatter_add(0, chosen, torch.ones_like(chosen)))
        self._tokens = x.shape[0]


@contextmanager
def observe_routing(model: nn.Module) -> Iterator[RoutingObserver]:
    """Watch one forward pass of `model`: `with observe_routing(model) as seen: hidden = model(batch)`."""
    observer = RoutingObserver()
    hooks = [router.register_forward_hook(observer.see) for router in routers(model)]
    try:
        yield observer
    finally:
        for hook in hooks:
            hook.remove()


def routers(model: nn.Module) -> list[Router]:
    """In the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


def balancing_loss(routing: Routing, counts: Tensor, tokens: int) -> Tensor:
    """This rank's and batch's share, [], of the balancing loss: experts * sum_e fraction_e * mean probability_e.

    Fraction and mean are taken over the tokens of all layers together, as transformers does; it is per_token where all
    experts are equally busy. routing: of the tokens at hand. counts [layers, experts] and tokens: of the whole step,
    over all ranks and micro-batches; the shares then add up to the loss of the step, and so do their gradients, because
    none flow through counts. Multiply by `ExpertsConfig.balance_weight`.
    """
    layers, experts = counts.shape
    rows = layers * tokens
    fractions = counts.sum(0).to(routing.probabilities.dtype) / rows
    return experts * (fractions * routing.probabilities.sum(0)).sum() / rows


@torch.no_grad()
def add_selection_bias(model: nn.Module) -> None:
    """Let every router add a bias, zero at first, to the probabilities by which it chooses.

    It is no part of the formats of Mixtral and Qwen3-MoE: a saved model routes without it.
    """
    for router in routers(model):
        router.selection_bias = torch.zeros(router.weight.shape[0], device=router.weight.device)


@torch.no_grad()
def update_selection_bias(model: nn.Module, counts: Tensor, rate: float) -> None:
    """After a step: raise the bias of experts that were chosen less often than the mean by `rate`, lower the others'.

    counts: [layers, experts] of the whole step, over all ranks (`Routing.counts` added up).
    """
    for router, own in zip(routers(model), counts.double(), strict=True):
        assert router.selection_bias is not None
        router.selection_bias += rate * torch.sign(own.mean() - own).to(router.selection_bias.dtype)
