"""Mixture of experts (Shazeer et al. 2017): a router and expert MLPs, with the parameter names of transformers."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from strata.kernels.linear.linear import linear, wide_linear
from strata.kernels.moe.experts import biased_experts, experts
from strata.kernels.moe.route import route
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.layers import MLP, CausalLM

# What checkpoints call the biases of routers that no gradient moves.
CORRECTION = "e_score_correction_bias"
_OF_EXPERTS = re.compile(r"experts\.(gate_up|down)_proj(_bias)?")


@dataclass(frozen=True)
class ExpertNames:
    """What checkpoints call the block of router and experts, and an expert's three matrices.

    joined: whether they hold those of all experts in one tensor (`strata.models.joined`).
    """

    block: str
    gate: str
    up: str
    down: str
    joined: bool = False


class ExpertRouter(nn.Module):
    """Which experts each token goes to: [tokens, hidden] to weights and numbers of experts, both [tokens, per_token].

    selection_bias: [experts] float32 or None, added to the scores for the choice alone; e_score_correction_bias: the
    same as a frozen parameter of checkpoints, which stays float32 whatever the model is cast to, because in bfloat16
    experts that differ would get the same. balance: in training,
    what weights, choice and logits pass through (`strata.models.balance`).
    """

    selection_bias: Tensor | None
    balance: nn.Module | None

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.count, hidden_size))
        self.per_token, self.normalized, self.choice = config.per_token, config.normalized, config.choice
        self.wide_scores = config.wide_scores
        if config.biased:
            bias = torch.empty(config.count, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.count)) if config.clamp is not None else None
        self.register_buffer("selection_bias", None)
        self.register_module("balance", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bias: Tensor | None = self.selection_bias
        if bias is None:
            bias = getattr(self, CORRECTION, None)
        logits = wide_linear(x, self.weight) if self.wide_scores else linear(x, self.weight, self.bias)
        weights, chosen = route(logits, bias, self.per_token, self.normalized, self.choice)
        if self.balance is not None:
            weights = self.balance(weights, chosen, logits)
        return weights, chosen

    def hold_bias(self) -> None:
        """Let the bias of checkpoints be no parameter, which an optimizer would be given, but the `selection_bias`;
        that is None on the meta device, until somebody sets it."""
        bias = getattr(self, CORRECTION, None)
        if bias is not None:
            self.selection_bias = None if bias.is_meta else bias.data
            del self.e_score_correction_bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertRouter:
        bias = getattr(self, CORRECTION, None)
        kept = None if bias is None else bias.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and kept is not None:
            device = self.weight.device
            kept = torch.empty_like(kept, device=device) if kept.is_meta else kept.to(device)
            self.e_score_correction_bias = nn.Parameter(kept, requires_grad=False)
        return self


class Experts(nn.Module):
    """SwiGLU experts, stacked: gate_up_proj [experts, 2 * intermediate, hidden] holds the rows of the gate, then those
    of up; down_proj [experts, hidden, intermediate]. In a part of a model those that it holds, in the order of `held`,
    which whoever moves experts changes: what it computes is told by its graph then (`strata.graph.ranks.shard`), not by
    calling it.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.is_part, self.local = config.local is not None, config.local or tuple(range(config.count))
        self.gate_up_proj = nn.Parameter(torch.empty(config.local_count, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.local_count, hidden_size, width))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return experts(x, weights, chosen, self.gate_up_proj, self.down_proj)


class BiasedExperts(nn.Module):
    """`Experts` within bounds and with biases: gate_up_proj_bias [experts, 2 * intermediate], down_proj_bias [experts,
    hidden].
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        width, count = config.intermediate_size, config.count
        assert config.clamp is not None
        self.clamp = config.clamp
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden_size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, width))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        biases = self.gate_up_proj_bias, self.down_proj_bias
        return biased_experts(x, weights, chosen, self.gate_up_proj, self.down_proj, *biases, self.clamp)


class SparseMLP(nn.Module):
    """The weighted sum of what a token's experts make of it: [tokens, hidden] to the same.

    shared: what every token goes to besides, unweighted.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, shared: MLP | None = None) -> None:
        super().__init__()
        self.gate = ExpertRouter(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        routed = self.experts(x, weights, chosen)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


class SparseCausalLM(CausalLM):
    """A decoder in which the layers of `config.experts.layers` have experts instead of a plain MLP.

    expert_names: those of the family's checkpoints, which hold each expert's matrices apart.
    """

    expert_names: ExpertNames

    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__(config, max_length)
        assert config.experts is not None
        self.expert_count = config.experts.count
        for layer, sparse in zip(self.model.layers, config.experts.layers, strict=True):
            if sparse:
                layer.mlp = self.sparse_mlp(config, config.experts)

    @staticmethod
    def sparse_mlp(config: ModelConfig, experts: ExpertsConfig) -> nn.Module:
        """The router and the experts of a layer."""
        shared = MLP(replace(config, intermediate_size=experts.shared_size)) if experts.shared_size else None
        return SparseMLP(config.hidden_size, experts, shared)


def has_joined_experts(model: nn.Module) -> bool:
    """Whether the family's checkpoints hold the matrices of all experts in one tensor, in an order of their own."""
    return isinstance(model, SparseCausalLM) and model.expert_names.joined


def stored_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by their names in a checkpoint; of experts that lie in one parameter, a view of each matrix."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found.update(stored_views(model, name, parameter))
    return found


def stored_views(model: nn.Module, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`value` of the parameter `name`, or views of it, under the names in a checkpoint."""
    if isinstance(model, SparseCausalLM):
        owner = model.get_submodule(name.rpartition(".")[0])
        held = owner.local if isinstance(owner, Experts) else range(len(value))
        yield from _stored(name, value.detach(), model.expert_names, held)
    else:
        yield stored_name(model, name), value


def stored_view(model: nn.Module, name: str, number: int, value: Tensor) -> Tensor:
    """Number `number` of `stored_views`, without a walk over the others."""
    own = name.partition(".mlp.experts.")[2]
    if not (own and isinstance(model, SparseCausalLM)):
        return value
    return value[number // 2].chunk(2)[number % 2] if own.startswith("gate_up") else value[number]


def stored_name(model: nn.Module, name: str) -> str:
    """What a checkpoint calls the parameter `name`, or what it would call it."""
    renamed = model.renamed if isinstance(model, CausalLM) else {}
    own = next((own for own in renamed if own in name), "")
    return name.replace(own, renamed[own], 1) if own else name


def _stored(name: str, parameter: Tensor, names: ExpertNames, held: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    layer, _, rest = name.partition(".mlp.")
    of_experts = _OF_EXPERTS.fullmatch(rest)
    if of_experts is None:
        yield f"{layer}.{names.block}.{rest}" if rest == "gate.weight" else name, parameter
        return
    parts = (names.gate, names.up) if of_experts[1] == "gate_up" else (names.down,)
    kind = "bias" if of_experts[2] else "weight"
    for number, both in zip(held, parameter, strict=True):
        for own, matrix in zip(parts, both.chunk(len(parts)), strict=True):
            yield f"{layer}.{names.block}.experts.{number}.{own}.{kind}", matrix
