"""FSDP2 and hybrid sharding, alone and with tensor parallelism, against one process: five steps of AdamW, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.kernels.loss.loss import linear_cross_entropy
from strata.models.families import build
from strata.parallel.layout import Layout
from strata.parallel.parallelize import parallelize
from tests.largest import largest
from tests.parallel.models import config_of, fill_masters, head_weight, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks
from tests.parallel.steps import CLIP, steps_of_ranks

LAYOUTS = {
    2: [
        ("llama", Layout(shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, zero=3)),
        ("qwen3-next", Layout(shard=2, ep=2, zero=3)),
    ],
    4: [
        ("llama-biases-tied", Layout(shard=4, zero=3)),
        ("qwen2", Layout(dp=2, shard=2, zero=3)),
        ("llama", Layout(shard=2, tp=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=3, sequence_parallel=True)),
    ],
}


def all_layouts(world: World, folder: Path) -> list[Any]:
    return [steps_of_ranks(world, config_of(name), layout) for name, layout in LAYOUTS[world.size]]


@pytest.mark.parametrize("world", LAYOUTS)
def test_five_steps_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(all_layouts, world, tmp_path)
    for (name, layout), *found in zip(LAYOUTS[world], *ranks, strict=True):
        assert largest(one["worst"][1] for one in found) < 1e-9, (name, layout, found)
        assert found[0]["smallest norm"] > 2 * CLIP


CONFIG = config_of("qwen3-biases-tied")


def details(world: World, folder: Path) -> dict[str, Any]:
    """Mixed precision, and a model that begins on the meta device."""
    batch, targets = random_batch(CONFIG, [7, 5])
    layout = Layout(shard=world.size, zero=3)
    source = random_model(CONFIG, torch.float32)
    with torch.device("meta"):
        model = build(CONFIG)
    mesh = layout.mesh(world)
    parallel = parallelize(model, CONFIG, layout, mesh, compute_dtype=torch.bfloat16)
    fill_masters(parallel, layout, mesh, source.named_parameters())
    parallel.gradients.sync_weights()
    narrow = random_model(CONFIG, torch.float32).to(torch.bfloat16)
    entered: list[torch.dtype] = []
    model.model.layers[1].register_forward_pre_hook(lambda _, inputs: entered.extend(x.dtype for x in inputs[2:]))
    hidden, wanted = model(batch), narrow(batch)
    losses = [linear_cross_entropy(h, head_weight(m), targets).sum() for h, m in ((hidden, model), (wanted, narrow))]
    (losses[0] / world.size).backward()  # all ranks see the same tokens, each with its share of the loss
    losses[1].backward()
    parallel.gradients.accumulate()
    parallel.gradients.reduce()
    layer = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    return {
        "angles": sorted(map(str, entered)),
        # Gathered weights lie at other addresses, on which the bits of a product may depend.
        "hidden": relative_error(hidden.float(), wanted.float()),
        "loss": relative_error(*losses),
        "divided": layer.to_local().numel() < layer.numel(),
        "dtypes": sorted({str(part.master.grad.dtype) for part in parallel.gradients.shards}),
        "norm": abs(float(parallel.gradients.norm() / global_norm_of(narrow)) - 1),
    }


def global_norm_of(model: torch.nn.Module) -> torch.Tensor:
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters()]
    return torch.cat(gradients).norm()


def test_bfloat16_computes_as_one_process_does_and_keeps_float32_masters(tmp_path: Path) -> None:
    for found in run_ranks(details, 2, tmp_path):
        assert found["angles"] == ["torch.float32"] * 2
        assert found["hidden"] < 2e-2
        assert found["loss"] < 2e-2
        assert found["divided"]
        assert found["dtypes"] == ["torch.float32"]
        assert found["norm"] < 1e-2
