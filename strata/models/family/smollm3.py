"""SmolLM3 (Bakouch et al. 2025): Llama whose every fourth layer leaves positions out (Yang et al. 2025, RNoPE)."""

from __future__ import annotations

from torch import Tensor

from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM


class UnrotatedAttention(Attention):
    """Attention that learns of positions from the causal order alone."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


class SmolLM3(CausalLM):
    """One `attention_bias` for all four projections; `config.rotated` says which layers are rotated."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        kind = Attention if config.rotated[layer] else UnrotatedAttention
        return kind(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
