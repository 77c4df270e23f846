"""Qwen3 (Yang et al. 2025): queries and keys are normalized per head before they are rotated."""

from __future__ import annotations

from strata.models.layers import Attention, CausalLM, RMSNorm


class Qwen3Attention(Attention):
    head_norm = RMSNorm


class Qwen3(CausalLM):
    """Layers may alternate between full and sliding attention (`config.windows`)."""

    attention = Qwen3Attention
