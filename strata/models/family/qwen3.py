"""Qwen3 (Yang et al. 2025): queries and keys are normalized per head before they are rotated."""

from __future__ import annotations

from torch import Tensor

from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM, RMSNorm


class Qwen3Attention(Attention):
    """Attention with an RMSNorm over head_dim, shared by the heads, on queries and on keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3(CausalLM):
    """Layers may alternate between full and sliding attention (`config.windows`)."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Qwen3Attention(config, layer)
