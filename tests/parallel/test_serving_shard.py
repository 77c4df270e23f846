"""The shards of a served model: what they hold together, and what cannot be divided."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from strata.models.experts import stored_views
from strata.models.families import build
from strata.models.part import inside
from strata.parallel.serving_shard import RankShard, rank_config

from .models import config_of
from .shards import FAMILIES, RANKS, divisible_config

WHOLE = re.compile(
    r".*(norm\.weight|o_proj\.bias|down_proj[._]bias|mlp\.(gate|router)\.(weight|bias|e_score_correction_bias)"
    r"|_a_proj(_with_mqa)?\.weight)"
)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_together_hold_every_element(name: str, size: int) -> None:
    config = divisible_config(name)
    with torch.device("meta"):
        model = build(config)
    shards = [RankShard.of(config, size, index) for index in range(size)]
    for parameter, value in model.named_parameters():
        for stored, matrix in stored_views(model, parameter, value):
            holders = torch.zeros(matrix.shape, dtype=torch.int)
            for shard in shards:
                for box in shard.boxes(parameter, tuple(matrix.shape)):
                    holders[inside(box)] += 1
            expected = 1
            divided_norm = name.startswith("olmo") and parameter.endswith(("q_norm.weight", "k_norm.weight"))
            if WHOLE.fullmatch(parameter) and not divided_norm:
                expected = size
            elif any(part in parameter for part in ("k_proj", "v_proj", "k_norm")):
                expected = max(1, size // config.num_kv_heads)
            assert (holders == expected).all(), stored


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_box_fills_the_parameter_of_the_ranks_own_model(name: str, size: int) -> None:
    """But for the vocabulary: 61 ids, of which each rank has room for as many as the first."""
    config = divisible_config(name)
    with torch.device("meta"):
        model = build(config)
    for index in range(size):
        shard = RankShard.of(config, size, index)
        with torch.device("meta"):
            rank_model = build(shard.config)
        own = dict(rank_model.named_parameters())
        for parameter, value in model.named_parameters():
            of_rank = stored_views(rank_model, parameter, own[parameter])
            for (_, matrix), (_, part) in zip(stored_views(model, parameter, value), of_rank, strict=True):
                (box,) = shard.boxes(parameter, tuple(matrix.shape))
                sizes = tuple(end - first for first, end in box)
                if "embed_tokens" in parameter or "lm_head" in parameter:
                    first, end = box[0]
                    room = -(-61 // size)
                    assert part.shape[0] == room
                    assert (first, end) == (min(61, index * room), min(61, index * room + room))
                else:
                    assert sizes == tuple(part.shape), parameter


def test_a_rank_attends_with_the_kv_head_of_its_query_heads() -> None:
    """Eight query heads of dimension 4 over two KV heads: query head h reads KV head h // 4."""
    config = divisible_config("llama", num_key_value_heads=2)
    for index in range(8):
        shard = RankShard.of(config, 8, index)
        assert (shard.config.num_heads, shard.config.num_kv_heads, shard.config.head_dim) == (1, 1, 4)
        own = shard.boxes("model.layers.0.self_attn.q_proj.weight", (32, 24))[0][0]
        read = shard.boxes("model.layers.1.self_attn.k_proj.weight", (8, 24))[0][0]
        assert own == (index * 4, index * 4 + 4)
        assert read == (index // 4 * 4, index // 4 * 4 + 4)


def test_gate_and_up_of_experts_are_divided_each_by_itself() -> None:
    shard = RankShard.of(divisible_config("mixtral"), 4, 1)
    prefix = "model.layers.0.mlp.experts."
    assert shard.config.experts is not None
    assert shard.config.experts.intermediate_size == 10
    assert shard.boxes(prefix + "gate_up_proj", (40, 24)) == (((10, 20), (0, 24)),)
    assert shard.boxes(prefix + "down_proj", (24, 40)) == (((0, 24), (10, 20)),)


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
