"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025): experts scored by sigmoids, with a shared one, behind a few dense layers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from strata.models.config import ModelConfig
from strata.models.experts import ExpertNames, SparseCausalLM
from strata.models.layers import Attention, RMSNorm


class Glm4MoeAttention(Attention):
    """Biases on queries, keys and values alone; norms of heads where `use_qk_norm` asks for them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, qkv_bias=config.attention_bias, output_bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.head_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.head_norms else None

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        if self.q_norm is None or self.k_norm is None:
            return q, k, v
        return self.q_norm(q), self.k_norm(k), v


class Glm4Moe(SparseCausalLM):
    """A part of each head is rotated. Layers that predict further tokens follow the last one in checkpoints."""

    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    has_layers_behind: ClassVar[bool] = True

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Glm4MoeAttention(config, layer)
