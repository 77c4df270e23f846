"""AdamW and Muon under every way of dividing parameters against one process: three steps with clipping in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.layout import Layout
from strata.parallel.parallelize import parallelize
from strata.train.optimizer.clip import clip_scale
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from tests.largest import largest, name_of_largest
from tests.parallel.models import config_of, loss_of, random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import CLIP, accumulate, batches, counted_tokens, weight_errors
from tests.train.plain_optimizers import plain_step

STEPS = 3
RATE = 1e-2

LAYOUTS = {
    2: [
        ("llama-biases-tied", Layout(dp=2), "muon"),
        ("qwen3-biases-tied", Layout(shard=2, zero=1), "muon"),
        ("llama", Layout(shard=2, zero=2), "muon"),
        ("llama", Layout(shard=2, zero=3), "muon"),
        ("llama-biases-tied", Layout(tp=2), "muon"),
        ("qwen3-moe", Layout(shard=2, zero=1), "muon"),
        ("mixtral", Layout(shard=2, ep=2, zero=2), "muon"),
        ("llama-biases-tied", Layout(shard=2, zero=1), "adamw"),
        ("qwen3-moe", Layout(shard=2, zero=3), "adamw"),
    ],
    4: [
        ("llama", Layout(dp=2, shard=2, zero=1), "muon"),
        ("llama-biases-tied", Layout(dp=2, shard=2, zero=3), "muon"),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True), "muon"),
        ("llama", Layout(shard=2, tp=2, zero=3), "muon"),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=3), "muon"),
        ("mixtral", Layout(dp=2, shard=2, ep=2, zero=1), "muon"),
    ],
}


def wanted_model(config: ModelConfig, replicas: int, settings: OptimizerConfig, device: torch.device) -> CausalLM:
    """Of one process, plainly."""
    model = random_model(config).to(device)
    state: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        work = batches(config, step, replicas, device)
        total = sum(loss_of(model, *one) for row in work for one in row) / counted_tokens(work)
        model.zero_grad()
        total.backward()
        norm = float(torch.cat([one.grad.flatten() for one in model.parameters()]).norm())
        assert norm > 2 * CLIP
        plain_step(model, state, settings, RATE / (step + 1), step + 1, settings.clip / (norm + 1e-6))
    return model


def steps_against_one_process(world: World, name: str, layout: Layout, optimizer: str) -> dict[str, Any]:
    """The largest relative error of this rank's masters and weights, and what it holds of state."""
    config = config_of(name)
    layout.check(config, world.size)
    mesh = layout.mesh(world)
    documents = mesh.flattened("dp", "shard")
    model = random_model(config).to(world.device)
    parallel = parallelize(model, config, layout, mesh, bucket_elements=1)  # a bucket a layer
    gradients = parallel.gradients
    settings = OptimizerConfig(learning_rate=RATE, name=optimizer, clip=CLIP)
    changes = make_optimizer(gradients.shards, settings, mesh, parallel.sharding)
    for step in range(STEPS):
        work = batches(config, step, documents.size, world.device)
        accumulate(model, config, parallel, work[documents.index], counted_tokens(work))
        gradients.reduce()
        changes.begin(RATE / (step + 1))
        changes.update(clip_scale(gradients.norm(), CLIP))
        gradients.sync_weights()
    errors = weight_errors(model, parallel, wanted_model(config, documents.size, settings, world.device))
    worst = name_of_largest(errors)
    held = {kind: [one.numel() for one in tensors] for kind, tensors in changes.state().items()}
    return {"worst": [worst, errors[worst]], "held": held, "parts": [part.master.numel() for part in gradients.shards]}


def all_layouts(world: World, folder: Path) -> list[Any]:
    return [steps_against_one_process(world, *one) for one in LAYOUTS[world.size]]


@pytest.mark.parametrize("world", LAYOUTS)
def test_three_steps_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(all_layouts, world, tmp_path)
    for (name, layout, optimizer), *found in zip(LAYOUTS[world], *ranks, strict=True):
        assert largest(one["worst"][1] for one in found) < 1e-9, (name, layout, optimizer, found)
        for one in found:
            # Every part has either a momentum or both moments, as large as itself.
            state = one["held"]
            if optimizer == "adamw":
                assert state == {"exp_avg": one["parts"], "exp_avg_sq": one["parts"]}
            else:
                assert state["exp_avg"] == state["exp_avg_sq"]
                rows = zip(state["momentum"], state["exp_avg"], one["parts"], strict=True)
                assert all(sorted(held) == [0, part] for *held, part in rows)
