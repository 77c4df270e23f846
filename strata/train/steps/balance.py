"""Keeps the experts of a model in training equally busy, over any layout, from what all its tokens chose in a step.

Fractions are those of the whole step, over all ranks and packs (Qiu et al. 2025: within a micro-batch they would hold
experts back from specializing), so they do not depend on the layout. Those of a step are known only after its passes;
the balancing loss therefore weighs the probabilities of a step with the fractions of the step before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Mesh
from strata.models.balance import Balance, balancing_loss, balancing_slopes, fractions, routers
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.checkpoints.state import StateShard, bias_shards, whole_shard
from strata.train.config import BalanceConfig


class NoBalancing:
    """Of a model without experts, or one whose experts nobody watches. A step calls the methods in this order."""

    def attach(self, model: nn.Module) -> None:
        """Let the routers of `model`, whole or this rank's stages, be balanced. Once it is on its device, before it is
        captured.
        """

    def begin(self, tokens: Tensor) -> None:
        """Before the passes of a step. tokens: [] how many the step has, on all ranks together."""

    def reduce(self) -> None:
        """After them: add up what all ranks have seen."""

    def update(self, norm: Tensor) -> None:
        """After the optimizer. norm: of the step's gradient; nothing changes if it is not finite."""

    def metrics(self) -> dict[str, Tensor]:
        """Of the step, for the log, [] each."""
        return {}

    def state_shards(self) -> list[StateShard]:
        """What the next step needs of this one: every rank has all of it, and one writes it to a checkpoint."""
        return []


class Balancing(NoBalancing):
    """Of a model with experts. Every rank holds the state of all layers, those of other stages too.

    The host never waits, and all memory stays where it is, so that steps may be captured.
    """

    def __init__(self, experts: ExpertsConfig, method: BalanceConfig, layout: Layout, mesh: Mesh) -> None:
        self._experts, self._method = experts, method
        self._layers = [layer for layer, is_sparse in enumerate(experts.layers) if is_sparse]
        self._world_axis = all_ranks(mesh)
        # Ranks along "tp" see the same tokens, unless they share them out.
        self._repeats = 1 if layout.sequence_parallel else layout.tp
        shape, device = (len(self._layers), experts.count), mesh.world.device
        self._totals = torch.zeros(shape[0], 2, shape[1], dtype=torch.float64, device=device)
        self._fractions, self._slopes = torch.zeros(2, *shape, dtype=torch.float64, device=device).unbind()
        self._bias = torch.zeros(shape, device=device)
        self._has_bias = experts.biased or method.method == "bias"

    def attach(self, model: nn.Module) -> None:
        for name, router in routers(model).items():
            place = self._layers.index(int(name.split(".")[2]))  # model.layers.N
            slopes = self._slopes[place] if self._method.method == "loss" else None
            router.balance = Balance(self._totals[place], slopes)
            if self._has_bias:
                router.selection_bias = self._bias[place]

    def begin(self, tokens: Tensor) -> None:
        self._totals.zero_()
        if self._method.method == "loss":
            weight = self._experts.balance_weight
            self._slopes.copy_(balancing_slopes(self._fractions, tokens.clamp(min=1), weight))

    def reduce(self) -> None:
        self._totals.copy_(start_all_reduce(self._totals.clone(), self._world_axis).wait() / self._repeats)

    @torch.no_grad()
    def update(self, norm: Tensor) -> None:
        counts = self._totals[:, 0]
        if self._method.method == "loss":
            found = fractions(counts, self._experts.per_token)
            self._fractions.copy_(torch.where(norm.isfinite(), found, self._fractions))
        if self._method.method == "bias":
            to_mean = torch.sign(counts.mean(1, keepdim=True) - counts).to(self._bias.dtype)
            self._bias.add_(torch.where(norm.isfinite(), self._method.rate * to_mean, 0))

    def metrics(self) -> dict[str, Tensor]:
        """balance_loss: without its weight, of this step's own fractions; it is the number of experts of a token where
        all are equally busy. busiest_expert: of the choices of all tokens in a layer, the largest share that went to
        one expert of any layer; 1 / experts is the least. Scores of each expert by itself are no probabilities, and
        have no such loss.
        """
        counts, probabilities = self._totals.unbind(1)
        chosen = counts.sum(1, keepdim=True).clamp(min=1)
        found = {"busiest_expert": (counts / chosen).max()}
        if self._experts.choice.scoring == "softmax":
            means = probabilities * self._experts.per_token / chosen
            found["balance_loss"] = balancing_loss(fractions(counts, self._experts.per_token), means)
        return found

    def state_shards(self) -> list[StateShard]:
        is_written = self._world_axis.index == 0
        if self._has_bias:
            return bias_shards(self._by_router(self._bias), is_written)
        if self._method.method != "loss":
            return []
        by_router = self._by_router(self._fractions)
        return [whole_shard("expert_fractions", name, one, is_written) for name, one in by_router.items()]

    def _by_router(self, rows: Tensor) -> dict[str, Tensor]:
        return {f"model.layers.{layer}.mlp.gate": one for layer, one in zip(self._layers, rows, strict=True)}


def make_balancing(config: ModelConfig, method: BalanceConfig | None, layout: Layout, mesh: Mesh) -> NoBalancing:
    """A collective call. method: None watches nobody, and leaves a model's own biases as they are. Raises ValueError
    for a method without experts to balance, and for one that does not go with their scores.
    """
    if method is None and config.experts is not None and config.experts.biased:
        method = BalanceConfig("none")
    if method is None:
        return NoBalancing()
    if config.experts is None:
        raise ValueError(f"[balance] keeps experts equally busy, and {config.architecture} has none; remove [balance]")
    if method.method == "loss" and config.experts.choice.scoring != "softmax":
        raise ValueError(
            f"balance.method = 'loss' pulls at the probabilities of a softmax, and {config.architecture} scores each "
            "expert by itself; use 'bias', which moves the model's own biases, or 'none'"
        )
    return Balancing(config.experts, method, layout, mesh)
