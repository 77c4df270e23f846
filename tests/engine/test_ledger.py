"""The memory ledger adds up, and says what to change when something does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata.cache.pool import PoolShape
from strata.engine.build import decode_buckets
from strata.engine.ledger import activation_bytes, plan_memory
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES

CONFIG = config_from_dict(SHAPES["0.6B"], "0.6B")
POOL = PoolShape(CONFIG.num_layers, 16, CONFIG.num_kv_heads, CONFIG.head_dim, torch.bfloat16)
ASKED: dict[str, Any] = {
    "weight_bytes": 10**6,
    "max_tokens": 64,
    "max_sequences": 4,
    "max_length": 128,
    "utilization": 0.9,
    "num_pages": None,
    "dtype": torch.bfloat16,
    "graph_rows": 0,
}


def test_a_page_of_the_06b_shape_by_hand() -> None:
    assert POOL.page_bytes == 16 * 28 * 2 * 8 * 128 * 2


def test_the_parts_add_up_to_the_budget() -> None:
    ledger = plan_memory(CONFIG, POOL, torch.device("cpu"), **ASKED)
    assert ledger.weights + ledger.activations + ledger.graphs + ledger.kv + ledger.margin == ledger.budget
    assert ledger.pages == 4 * 128 // 16, "a CPU takes no more than its sequences could use"
    assert ledger.tokens == 4 * 128
    assert any(f"{ledger.tokens:,} tokens" in line for line in ledger.lines())


def test_too_little_room_for_one_sequence_names_the_remedies() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        plan_memory(CONFIG, POOL, torch.device("cpu"), **ASKED | {"max_length": 10**9, "max_sequences": 1})


def test_more_pages_than_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="KV pages do not fit"):
        plan_memory(CONFIG, POOL, torch.device("cpu"), **ASKED | {"num_pages": 10**9})


def test_activations_cover_what_a_layer_holds() -> None:
    tokens = 10
    gate_up_and_product = 3 * CONFIG.intermediate_size
    residual_and_norm = 2 * CONFIG.hidden_size
    assert activation_bytes(CONFIG, tokens, 0, torch.bfloat16) == 2 * tokens * (residual_and_norm + gate_up_and_product)


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 500])
def test_every_batch_size_has_a_bucket_that_wastes_little(most: int) -> None:
    buckets = decode_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    for size in range(1, most + 1):
        bucket = next(bucket for bucket in buckets if bucket >= size)
        assert bucket <= max(2 * size, size + 31)
