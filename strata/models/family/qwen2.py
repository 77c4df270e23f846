"""Qwen2 and Qwen2.5 (Yang et al. 2024): queries, keys and values have biases, the output projection has none."""

from __future__ import annotations

from strata.models.layers import Attention, CausalLM


class Qwen2Attention(Attention):
    qkv_bias = True
    output_bias = False


class Qwen2(CausalLM):
    """Layers may alternate between full and sliding attention (`config.windows`)."""

    attention = Qwen2Attention
