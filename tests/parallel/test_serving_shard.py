"""What the ranks of a served model cannot divide; what they hold is seen of their weights and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata.models.config import ModelConfig
from strata.parallel.serving_shard import rank_config

from .models import config_of
from .shards import config_for, divisible_config
from .test_recurrent_shards import recurrent_config

LLAMA, MIXTRAL, QWEN3_MOE = divisible_config("llama"), config_for("mixtral"), config_for("qwen3-moe")
WHOLE_EXPERTS, OWN_TOKENS = {"expert_parallel": True}, {"expert_parallel": True, "attention_dp": True}


@pytest.mark.parametrize(
    ("config", "size", "options", "message"),
    [
        (LLAMA, 3, {}, r"tensor_parallel_size=3 does not divide the 8 attention heads; this model takes 1, 2, 4, 8"),
        (LLAMA, 16, {}, "does not divide the 8 attention heads"),
        (replace(LLAMA, num_heads=12, num_kv_heads=6), 4, {}, "neither divides the 6 KV heads nor"),
        (
            divisible_config("qwen2", intermediate_size=36),
            8,
            {},
            "does not divide intermediate_size = 36; this model takes 1, 2, 4",
        ),
        (config_for("mixtral", intermediate_size=37), 2, {}, "does not divide the experts' intermediate_size = 37"),
        (divisible_config("qwen3-moe", intermediate_size=37), 2, {}, "does not divide intermediate_size = 37"),
        (QWEN3_MOE, 2, {}, "does not divide the experts' intermediate_size = 11"),
        (LLAMA, 0, {}, "rank 0 of 0 ranks"),
        (recurrent_config("granite-hybrid"), 4, {}, "does not divide the 6 recurrent heads; this model takes 1, 2"),
        (recurrent_config("granite-hybrid", mamba_n_heads=12), 4, {}, "does not divide the 2 groups of state spaces"),
        (recurrent_config("qwen3-next"), 4, {}, "does not divide the 2 key heads of recurrent layers; .* takes 1, 2"),
        (recurrent_config("qwen3-next"), 2, OWN_TOKENS, "enable_dp_attention=True is not there for recurrent layers"),
        (LLAMA, 2, WHOLE_EXPERTS, "enable_expert_parallel=True needs a mixture of experts"),
        (
            config_for("mixtral", num_local_experts=3),
            4,
            WHOLE_EXPERTS,
            r"=4 is more than the 3 experts, of which .*; this model takes 1, 2",
        ),
        (config_of("gpt-oss"), 2, WHOLE_EXPERTS, "enable_expert_parallel=True is not there for experts with biases"),
        *(
            (MIXTRAL, 2, WHOLE_EXPERTS | {"redundant": more}, rf"num_redundant_experts={more} with 6 .* 0, 2, 4, 6")
            for more in (1, 8)
        ),
        (LLAMA, 2, OWN_TOKENS, r"enable_dp_attention=True needs a mixture .* data_parallel_size instead"),
        (MIXTRAL, 2, {"attention_dp": True}, r"enable_dp_attention=True .* needs enable_expert_parallel=True"),
        (
            config_for("mixtral", num_local_experts=3),
            4,
            OWN_TOKENS,
            r"=4 is more than the 3 experts, of which .*; this model takes 1, 2, 3",
        ),
    ],
)
def test_what_cannot_be_divided(config: ModelConfig, size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_config(config, size, 0, **options)


def test_ranks_have_neighbouring_experts() -> None:
    assert rank_config(QWEN3_MOE, 2, 1, expert_parallel=True).experts.local == (3, 4, 5)  # type: ignore[union-attr]


def test_a_width_that_no_layer_has_need_not_divide() -> None:
    config = config_of("qwen3-moe", intermediate_size=37, moe_intermediate_size=16, mlp_only_layers=[])
    assert rank_config(config, 4, 3).experts is not None
