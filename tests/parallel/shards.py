"""Models of which eight ranks divide heads and widths, but neither the vocabulary nor the KV heads; their shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.models.config import ModelConfig
from strata.models.experts import stored_views
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.part import held, inside
from strata.parallel.serving_shard import RankShard

from .models import BIASED_CONFIGS, CONFIGS, config_of

FAMILIES = (*CONFIGS, *BIASED_CONFIGS)
# Whose norms stand before the branches, so that they take up the additions and messages behind the branches, one each.
PRE_NORM = tuple(name for name in FAMILIES if not name.startswith(("olmo", "gemma", "glm4", "deepseek", "gpt")))
RANKS = (2, 4, 8)


def divisible_config(name: str, **changes: Any) -> ModelConfig:
    """Of `CONFIGS`, with widths that eight ranks divide."""
    sizes: dict[str, Any] = {"intermediate_size": 40}
    if name == "qwen3-moe":
        sizes["moe_intermediate_size"] = 16
    if name.startswith("deepseek"):
        changes["num_key_value_heads"] = None  # every head has keys and values of its own
    return config_of(name, **(sizes | changes))


def shard_of(
    model: CausalLM, config: ModelConfig, size: int, index: int, axis: Axis | None = None, **options: int
) -> Any:
    """One rank's share of a whole model, and its own model with the slices copied. options: of `RankShard.of`."""
    shard = RankShard.of(config, size, index, axis, **options)
    own = build(shard.config).to(next(model.parameters()).dtype).requires_grad_(False)
    parameters = dict(own.named_parameters())
    with torch.no_grad():
        for name, value in model.named_parameters():
            sources = dict(stored_views(model, name, value))
            for stored, target in stored_views(own, name, parameters[name]):
                source = sources[stored]
                for box, place in held(target, shard.boxes(name, tuple(source.shape))):
                    place.copy_(source[inside(box)])
    return shard, own


def joined(found: Sequence[Sequence[Tensor]], vocabulary: int) -> list[Tensor]:
    """The logits of each step, from the parts of all ranks: each has those of its own ids."""
    return [torch.cat(parts, -1)[:, :vocabulary] for parts in zip(*found, strict=True)]
