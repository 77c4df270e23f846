"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in all or some layers."""

from __future__ import annotations

from strata.models.experts import ExpertNames, SparseCausalLM
from strata.models.family.qwen3 import Qwen3Attention


class Qwen3MoE(SparseCausalLM):
    """The attention of Qwen3; one sliding window for all layers, or none."""

    attention = Qwen3Attention
    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
