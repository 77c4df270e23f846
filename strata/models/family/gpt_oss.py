"""gpt-oss (OpenAI 2025): attention with sinks, a window in every other layer, and experts with biases and bounds."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.kernels.attention.attention import attention
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.experts import BiasedExperts, ExpertNames, ExpertRouter, SparseCausalLM
from strata.models.layers import Attention, WideRMSNorm


class GptOssAttention(Attention):
    """sinks [heads]: of each head a score that takes part in every softmax and has no value."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return attention(q, k, v, batch, self.spec, self.sinks)


class GptOssMLP(nn.Module):
    """The weighted sum of what a token's experts make of it: [tokens, hidden] to the same."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.router = ExpertRouter(hidden_size, config)
        self.experts = BiasedExperts(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        return self.experts(x, weights, chosen)


class GptOss(SparseCausalLM):
    """Norms round once. Checkpoints hold the matrices of all experts in one tensor, as floats or packed in mxfp4."""

    attention = GptOssAttention
    norm = WideRMSNorm
    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", joined=True)

    @staticmethod
    def sparse_mlp(config: ModelConfig, experts: ExpertsConfig) -> nn.Module:
        return GptOssMLP(config.hidden_size, experts)
