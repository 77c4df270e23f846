"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose checkpoints join projections, with longer and partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from strata.models.layers import CausalLM


class Phi3(CausalLM):
    """No biases; one sliding window for all layers, or none."""

    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
