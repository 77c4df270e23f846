"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025): experts scored by sigmoids, with a shared one, behind a few dense layers."""

from __future__ import annotations

from typing import ClassVar

from strata.models.experts import ExpertNames, SparseCausalLM
from strata.models.layers import Attention, RMSNorm


class Glm4MoeAttention(Attention):
    """Biases on queries, keys and values alone; norms of heads where `use_qk_norm` asks for them."""

    output_bias = False
    head_norm = RMSNorm


class Glm4Moe(SparseCausalLM):
    """A part of each head is rotated. Layers that predict further tokens follow the last one in checkpoints."""

    attention = Glm4MoeAttention
    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    has_layers_behind: ClassVar[bool] = True
