"""Qwen2 and Qwen2.5 (Yang et al. 2024): queries, keys and values have biases, the output projection has none."""

from __future__ import annotations

from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM


class Qwen2(CausalLM):
    """Layers may alternate between full and sliding attention (`config.windows`)."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=True, output_bias=False)
