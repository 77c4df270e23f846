"""Recurrent layers over ranks: each has some heads, with their rows of stacked matrices and their states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx

from strata.graph.walk import operation_counts
from strata.models.config import ModelConfig, config_from_dict
from strata.models.experts import stored_parameters
from strata.models.families import FAMILIES
from strata.models.save import save
from strata.models.state import RecurrentState
from strata.models.weights import load
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import replayed, step_program
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS, HandStates
from tests.parallel.models import random_model
from tests.parallel.shards import follow, joined, largest_error, model_of, programs_of, prompts_and_decodes, together

CHANGES: dict[str, dict[str, Any]] = {
    "mamba2-wide-heads": {},
    "mamba2-limited-tied": {"num_heads": 4, "head_dim": 15},  # one group: the norm is over the columns of all ranks
    "granite-hybrid": {"shared_intermediate_size": 40},
    "granite-hybrid-experts": {"mamba_proj_bias": True},
    "qwen3-next": {"intermediate_size": 32},
}
SHARED = ("mamba2-limited-tied", "granite-hybrid-experts")


def recurrent_config(name: str, **more: Any) -> ModelConfig:
    return config_from_dict(RECURRENT_CONFIGS[name] | CHANGES[name] | more)


def logits_of(graphs: Sequence[fx.GraphModule], configs: Sequence[ModelConfig], vocabulary: int) -> list[list[Tensor]]:
    caches = [HandStates(config, 3) for config in configs]
    return follow(caches, prompts_and_decodes(vocabulary), together(graphs))


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        *((name, 2, {}) for name in CHANGES),
        ("granite-hybrid-experts", 4, {}),
        ("granite-hybrid-experts", 2, {"expert_parallel": True}),
        ("qwen3-next", 2, {"expert_parallel": True}),
    ],
)
def test_steps_of_all_ranks_have_the_logits_of_one(name: str, size: int, options: dict[str, Any]) -> None:
    config = recurrent_config(name)
    model = model_of(config)
    (wanted,) = logits_of([step_program(model, "cpu").logits], [config], config.vocab_size)
    shards, made = programs_of(model, config, size, overlap=2, **options)
    graphs = [one.logits for one in made]
    configs = [one.config for one in shards]
    for each in (graphs, [replayed(one, 2) for one in made]):  # whose messages travel beside products
        found = joined(logits_of(each, configs, config.vocab_size), config.vocab_size)
        assert largest_error(found, wanted) < 2e-5
    assert bool(operation_counts(graphs[0])["sharded_gated_rms_norm"]) is (name in SHARED)
    for rank in shards:
        whole, own = (
            [state for state in FAMILIES[of.architecture].states(of) if isinstance(state, RecurrentState)]
            for of in (config, rank.config)
        )
        assert [state.shapes[1][0] * size for state in own] == [state.shapes[1][0] for state in whole]


@pytest.mark.parametrize("name", ["granite-hybrid-experts", "qwen3-next"])
def test_a_part_is_read_out_of_stacked_rows(name: str, tmp_path: Path) -> None:
    """By the meaning of the rows, not by the boxes."""
    config = recurrent_config(name)
    save(random_model(config, torch.float32), config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for index in range(2):
        model, _ = load(tmp_path, part=RankShard.of(config, 2, index))
        own = stored_parameters(model)
        if name == "qwen3-next":
            at, sizes = "model.layers.0.linear_attn.conv1d.weight", (20, 20, 32)
            assert torch.equal(own[at], torch.cat([part.chunk(2)[index] for part in stored[at].split(sizes)]))
            continue
        at = "model.layers.0.mamba.in_proj.weight"
        gate, x, b, c, dt = stored[at].split((48, 48, 8, 8, 4))
        mine = torch.cat([gate.chunk(2)[index], x.chunk(2)[index], b, c, dt.chunk(2)[index]])
        assert torch.equal(own[at], mine)
        at = "model.layers.1.block_sparse_moe.input_linear.weight"
        mine = torch.cat([half.chunk(2, 1)[index] for half in stored[at].chunk(2, 1)], 1)
        assert torch.equal(own[at], mine)
