"""Balanced training steps of the ranks of a layout against one process that knows nothing of layouts, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.comm.launch import World
from strata.models.config import ModelConfig
from strata.models.experts import ExpertRouter
from strata.parallel.layout import Layout
from strata.train.config import BalanceConfig
from strata.train.steps.parallel_step import ParallelStep
from tests.parallel.models import config_of, random_model
from tests.parallel.ranks import relative_error
from tests.train.plain_losses import plain_logprobs, plain_loss
from tests.train.step_ranks import STEPS, made, of_whole, packs_of, plain_adamw, plain_update, rate_of, worst

# A weight, and a rate, at which balancing is no small part of what a step does.
WEIGHT, RATE = 0.7, 0.05


class Plain:
    """A model that balances its experts in the passes of plain PyTorch, with hooks on its routers."""

    def __init__(self, config: ModelConfig, method: str) -> None:
        self.model = random_model(config)
        self.routers = [module for module in self.model.modules() if isinstance(module, ExpertRouter)]
        self.method, self.count = method, config.num_experts
        self.per_token = self.routers[0].per_token
        self.fractions = [torch.zeros(self.count, dtype=torch.float64) for _ in self.routers]
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.routers]
        for router, seen in zip(self.routers, self.seen, strict=True):
            router.hold_bias()
            if method == "bias" and router.selection_bias is None:
                router.selection_bias = torch.zeros(self.count)
            router.register_forward_hook(lambda one, given, made, seen=seen: seen.append((given[0], made[1])))

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the passes since the last call: the loss to add, its value with their own fractions, the busiest share."""
        added = value = torch.zeros((), dtype=torch.float64)
        shares = []
        for place, (router, seen) in enumerate(zip(self.routers, self.seen, strict=True)):
            probabilities = torch.cat([(x @ router.weight.T).softmax(-1) for x, _ in seen])
            chosen = torch.cat([one for _, one in seen])
            counts = torch.stack([(chosen == expert).sum() for expert in range(self.count)]).double()
            means, own = probabilities.mean(0), counts / len(chosen)
            added = added + WEIGHT * self.count * (self.fractions[place] * means).sum() / len(self.routers)
            value = value + self.count * (own * means).sum() / len(self.routers)
            shares.append(counts.max() / chosen.numel())
            self.fractions[place] = own
            if self.method == "bias":
                assert router.selection_bias is not None
                router.selection_bias += RATE * (counts.mean() - counts).sign().float()
            seen.clear()
        return added if self.method == "loss" else torch.zeros(()), value.detach(), torch.stack(shares).max()


def plain_steps(config: ModelConfig, method: str, replicas: int) -> tuple[Plain, list[dict[str, float]]]:
    """The model after the steps, and what each says."""
    plain = Plain(config, method)
    model, found = plain.model, []
    named = dict(model.named_parameters())
    optimizer = plain_adamw(named)
    for step in range(STEPS):
        packs = [one for replica in range(replicas) for one in packs_of(config, step, replica)]
        total = plain_loss("next token", [plain_logprobs(model, {}, one) for one in packs], packs)
        added, value, busiest = plain.loss()
        norm = plain_update(optimizer, total + added, named, step)
        said = {"loss": total, "balance_loss": value, "busiest_expert": busiest}
        found.append({"norm": norm} | {name: one.item() for name, one in said.items()})
    return plain, found


def balanced(
    world: World, family: str, method: str, layout: Layout, **options: Any
) -> tuple[ParallelStep, ModelConfig, int, int]:
    """The step, its config, the number of replicas, and which one this rank belongs to."""
    # Two layers with experts, which pp puts on different ranks.
    weight = {} if family.startswith("deepseek") else {"router_aux_loss_coef": WEIGHT}
    config = config_of(family, num_hidden_layers=3, **weight)
    balance = BalanceConfig(method, RATE)
    step, replicas, own = made(world, config, layout, balance=balance, **options)
    return step, config, replicas, own


def errors_of(world: World, family: str, method: str, layout: Layout, **options: Any) -> dict[str, float]:
    """Largest relative errors of what steps say, and of masters and the state of balancing after some of them."""
    step, config, replicas, own = balanced(world, family, method, layout, **options)
    plain, wanted = plain_steps(config, method, replicas)
    errors: dict[str, float] = {}
    for index, one in enumerate(wanted):
        result = step(packs_of(config, index, own), rate_of(index))
        said = {"loss": result.loss, "norm": result.norm, **result.metrics}
        for name in said.keys() & one.keys():
            value = one[name]
            errors[f"{name} {index}"] = abs(float(said[name]) / value - 1)
    state = {"expert_fractions": plain.fractions, "selection_bias": [one.selection_bias for one in plain.routers]}
    layers = [layer for layer, is_sparse in enumerate(config.experts.layers) if is_sparse]  # type: ignore[union-attr]
    names = [f"model.layers.{layer}.mlp.gate" for layer in layers]
    for piece in step.state_shards():
        if piece.kind == "master":
            whole = of_whole(piece, plain.model.get_parameter(piece.name))
            errors[piece.name] = relative_error(piece.tensor, whole)
        elif piece.kind in state:
            errors[f"{piece.kind} {piece.name}"] = relative_error(
                piece.tensor,
                state[piece.kind][names.index(piece.name)],  # type: ignore[arg-type]
            )
    return errors


def balanced_worst(world: World, folder: Path, layouts: list[list[Any]]) -> list[list[Any]]:
    """For every (family, method, layout, options), see `worst`."""
    return worst(world, layouts, errors_of)
