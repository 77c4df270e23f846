"""The arithmetic that a training step calls for; MFU (Chowdhery et al. 2022) is this over time and peak."""

from __future__ import annotations

from collections.abc import Sequence

from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.train.pack import PackedBatch


def step_flops(model: CausalLM, config: ModelConfig, batches: Sequence[PackedBatch]) -> int:
    """Forward and backward FLOPs of a step; recomputation would not count, and nothing is recomputed.

    6 * weights of the layers' matrices * tokens + 6 * vocab * hidden * counted tokens (the head sees only those)
    + 12 * layers * heads * head_dim * pairs, where a sequence of n tokens has n (n + 1) / 2 causal pairs.
    """
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() > 1)
    head = config.vocab_size * config.hidden_size
    attention = config.num_layers * config.num_heads * config.head_dim
    total = 0
    for batch in batches:
        lengths = batch.lengths.astype("int64")
        pairs = int((lengths * (lengths + 1) // 2).sum())
        total += 6 * matrices * len(batch.tokens) + 6 * head * len(batch.targets) + 12 * attention * pairs
    return total
