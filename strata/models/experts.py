"""Mixture of experts (Shazeer et al. 2017): a router and expert MLPs, with the parameter names of transformers."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.kernels.gemm import linear
from strata.kernels.moe_experts import experts
from strata.kernels.moe_route import route
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.layers import CausalLM


class Router(nn.Module):
    """Which experts each token goes to: [tokens, hidden] to weights and numbers of experts, both [tokens, per_token].

    selection_bias: [experts] float32 or None, added to the probabilities for the choice alone
    (`strata.models.balance`).
    """

    selection_bias: Tensor | None

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.count, hidden_size))
        self.per_token, self.normalized = config.per_token, config.normalized
        self.register_buffer("selection_bias", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = route(linear(x, self.weight, None), self.selection_bias, self.per_token, self.normalized)
        return weights, chosen


class Experts(nn.Module):
    """SwiGLU experts, stacked: gate_up_proj [experts, 2 * intermediate, hidden] holds the rows of the gate, then those
    of up; down_proj [experts, hidden, intermediate].
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.count, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.count, hidden_size, width))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return experts(x, weights, chosen, self.gate_up_proj, self.down_proj)


class SparseMLP(nn.Module):
    """The weighted sum of what a token's experts make of it: [tokens, hidden] to the same."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        return self.experts(x, weights, chosen)


class SparseCausalLM(CausalLM):
    """A decoder in which the layers of `config.experts.layers` have experts instead of a plain MLP."""

    def __init__(self, config: ModelConfig, max_length: int) -> None:
        super().__init__(config, max_length)
        assert config.experts is not None
        for layer, sparse in zip(self.model.layers, config.experts.layers, strict=True):
            if sparse:
                layer.mlp = SparseMLP(config.hidden_size, config.experts)
