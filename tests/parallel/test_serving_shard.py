"""What the ranks of a served model cannot divide; what they hold is seen of their weights and logits."""

from __future__ import annotations

from typing import Any

import pytest

from strata.parallel.serving_shard import rank_config

from .models import config_of
from .shards import divisible_config


@pytest.mark.parametrize(
    ("name", "changes", "size", "message"),
    [
        ("llama", {}, 3, r"tensor_parallel_size=3 does not divide the 8 attention heads; this model takes 1, 2, 4, 8"),
        ("llama", {}, 16, "does not divide the 8 attention heads"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "neither divides the 6 KV heads nor"),
        ("qwen2", {"intermediate_size": 36}, 8, "does not divide intermediate_size = 36; this model takes 1, 2, 4"),
        ("mixtral", {"intermediate_size": 37}, 2, "does not divide the experts' intermediate_size = 37"),
        ("qwen3-moe", {"intermediate_size": 37}, 2, "does not divide intermediate_size = 37"),
        ("llama", {}, 0, "rank 0 of 0 ranks"),
    ],
)
def test_what_cannot_be_divided(name: str, changes: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_config(divisible_config(name, **changes), size, 0)


def test_a_width_that_no_layer_has_need_not_divide() -> None:
    config = config_of("qwen3-moe", intermediate_size=37, moe_intermediate_size=16, mlp_only_layers=[])
    assert rank_config(config, 4, 3).experts is not None
