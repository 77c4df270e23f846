"""Llama 2 to 3.2 (Touvron et al. 2023, Grattafiori et al. 2024): biases where config.json says so."""

from __future__ import annotations

from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM


class Llama(CausalLM):
    """One `attention_bias` for all four projections; `mlp_bias` for the MLP's three."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
