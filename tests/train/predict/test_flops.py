"""FLOPs of a step against hand counts of one model of each family, and against the cost of the captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from strata.cost.nodes import NodeCost, node_costs
from strata.graph.trace import trace, trace_head
from strata.graph.walk import meta_indices
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig, config_from_dict
from strata.models.families import build
from strata.train.data.pack import PackedBatch
from strata.train.predict.flops import StepFlops, batch_flops, visible_pairs

LENGTHS = (5, 1, 9, 3)
TOKENS, COUNTED = 18, 11
PAIRS = 15 + 1 + 45 + 6
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "mlp_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 12, "tie_word_embeddings": True},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
}
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16  # q and o, k and v
# Elements that a token is multiplied by in all three layers; of the heads' outputs, and pairs, both over the layers.
BY_HAND = {
    "llama": (3 * (ATTENTION + 3 * 32 * 48), 3 * 32 * PAIRS),
    "qwen3": (3 * (2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 48), 3 * 48 * PAIRS),
    # A window of 4: 1 + 2 + 3 + 4 + 4, 1, 1 + 2 + 3 + 6 * 4, 1 + 2 + 3 pairs.
    "mixtral": (3 * (ATTENTION + 6 * 32 + 2 * 3 * 32 * 48), 3 * 32 * (14 + 1 + 30 + 6)),
    "qwen3_moe": (3 * ATTENTION + 3 * 32 * 48 + 2 * (8 * 32 + 3 * 3 * 32 * 16), 3 * 32 * PAIRS),
}


def config_of(family: str) -> ModelConfig:
    return config_from_dict(SMALL | {"model_type": family} | FAMILIES[family], family)


def pack() -> PackedBatch:
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int32)
    tokens = np.zeros(TOKENS, dtype=np.int32)
    counted = np.zeros(COUNTED, dtype=np.int64)
    return PackedBatch(tokens, tokens, offsets, counted, counted)


@pytest.mark.parametrize("family", FAMILIES)
def test_by_hand(family: str) -> None:
    elements, pairs = BY_HAND[family]
    found = batch_flops(config_of(family), [pack()])
    assert found == StepFlops(6 * elements * TOKENS, 12 * pairs, 6 * 100 * 32 * COUNTED)
    assert found.total == found.products + found.attention + found.head
    assert batch_flops(config_of(family), [pack(), pack()]) == found + found


def test_frozen_weights_have_no_gradient() -> None:
    whole = batch_flops(config_of("llama"), [pack()])
    frozen = batch_flops(config_of("llama"), [pack()], weights_are_frozen=True)
    assert frozen == StepFlops(whole.products // 3 * 2, whole.attention, whole.head // 3 * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_times_what_the_graph_of_the_model_costs(family: str) -> None:
    config = config_of(family)
    with torch.device("meta"):
        model = build(config)
    workload = Workload(LENGTHS, LENGTHS)
    indices = meta_indices(TOKENS)
    batch = Batch(indices, indices, meta_indices(len(LENGTHS) + 1), max(LENGTHS))
    nodes = node_costs(trace(model), batch, workload)
    head = node_costs(trace_head(model), torch.empty(COUNTED, 32, device="meta"), workload)
    found = batch_flops(config, [pack()])
    assert found.products == 3 * sum(_product_flops(node, config) for node in nodes)
    assert found.attention == 3 * sum(node.cost.flops for node in nodes if node.operation == "attention")
    assert found.head == 3 * sum(node.cost.flops for node in head)


def _product_flops(node: NodeCost, config: ModelConfig) -> int:
    """The cost of a node less what it does besides a matrix product: a bias; the activation and sum of experts."""
    if node.operation == "linear":
        bias = sum(size for name, size in node.parameters.items() if name.endswith(".bias"))
        return node.cost.flops - TOKENS * bias
    if node.operation != "experts" or config.experts is None:
        return 0
    rows = TOKENS * config.experts.per_token
    return node.cost.flops - 5 * rows * config.experts.intermediate_size - 2 * rows * config.hidden_size


def test_pairs_against_a_count_of_each() -> None:
    for window in (None, 1, 3, 9, 20):
        seen = [min(at + 1, window or at + 1) for length in LENGTHS for at in range(length)]
        assert visible_pairs(LENGTHS, window) == sum(seen)
    assert visible_pairs(np.array([100_000], dtype=np.int32), None) == 100_000 * 100_001 // 2  # no overflow
