"""Mistral (Jiang et al. 2023): no biases, one sliding window for all layers, or none."""

from __future__ import annotations

from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM


class Mistral(CausalLM):
    """The window of a layer is in `config.windows`."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=False, output_bias=False)
