"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer."""

from __future__ import annotations

from strata.models.experts import ExpertNames, SparseCausalLM


class Mixtral(SparseCausalLM):
    """No biases; one sliding window for all layers, or none."""

    expert_names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
