"""Expert parallelism against one process in float64: results, every gradient, idle experts and ranks without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.collectives import start_all_reduce
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.models.balance import routers
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.expert import shard_experts
from tests.parallel.models import config_of, gradients_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks

FAMILIES = ("mixtral", "qwen3-moe")
# Of one rank each; the last one of four has a single token.
LENGTHS = [[9, 4], [1, 13], [6], [1]]
# Experts that no token goes to: the last one, and all that the last rank holds.
IDLE = {"none": 0, "one": 1, "a whole rank": 2}


def model_with_idle_experts(config: ModelConfig, idle: int) -> CausalLM:
    model = random_model(config)
    for router in routers(model).values():
        router.selection_bias = torch.zeros(config.num_experts)
        router.selection_bias[config.num_experts - idle :] = -10
    return model


def batches(config: ModelConfig, ranks: int) -> list[tuple[Batch, torch.Tensor]]:
    return [random_batch(config, lengths, seed) for seed, lengths in enumerate(LENGTHS[:ranks])]


def equal_to_one_process(world: World, folder: Path) -> dict[str, Any]:
    """Of every model the largest relative error, by what it is the error of."""
    mesh = Mesh.of(world, {"shard": world.size, "ep": world.size})
    axis, found = mesh.axis("ep"), {}
    for name in FAMILIES:
        config = config_of(name)
        for kind, idle in IDLE.items():
            whole, model = model_with_idle_experts(config, idle), model_with_idle_experts(config, idle)
            losses = [loss_of(whole, *each) for each in batches(config, world.size)]
            torch.stack(losses).sum().backward()
            shard_experts(model, axis)
            loss = loss_of(model, *batches(config, world.size)[axis.index])
            loss.backward()
            errors = {"loss": relative_error(loss, losses[axis.index])}
            gradients = gradients_of(model)
            shared = [gradient for parameter, gradient in gradients.items() if ".experts." not in parameter]
            sums = start_all_reduce(torch.cat([gradient.flatten() for gradient in shared]), axis).wait()
            for gradient, total in zip(shared, sums.split([gradient.numel() for gradient in shared]), strict=True):
                gradient.copy_(total.view_as(gradient))
            for parameter, gradient in gradients.items():
                wanted = whole.get_parameter(parameter).grad
                assert wanted is not None
                if ".experts." in parameter:
                    wanted = wanted.chunk(axis.size)[axis.index]
                errors[parameter] = (gradient - wanted).abs().max().item() / max(1e-3, wanted.abs().max().item())
            worst = max(errors, key=errors.__getitem__)
            last = gradients_of(model)["model.layers.1.mlp.experts.down_proj"][-1]
            found[f"{name}, idle: {kind}"] = [worst, errors[worst], bool(last.any())]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_results_and_gradients_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(equal_to_one_process, world, tmp_path, timeout=120)
    for rank in ranks:
        assert len(rank) == 6
        assert all(error < 1e-9 for _, error, _ in rank.values()), rank
    for key, (_, _, busy) in ranks[-1].items():
        assert busy == key.endswith("none")


def test_one_rank_is_left_as_it_is() -> None:
    config = config_of("mixtral")
    model = random_model(config)
    before = list(model.modules())
    shard_experts(model, Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("ep"))
    assert list(model.modules()) == before
