"""Pipelines over NCCL against one GPU, in float32: loss and every gradient, for each schedule."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from strata.comm.launch import World, join_world
from strata.comm.mesh import Mesh
from strata.models.batch import Batch
from strata.parallel.loss import MicroBatch
from strata.parallel.pipeline import Pipeline
from strata.parallel.schedules import SCHEDULES, make_schedule
from strata.parallel.stages import ModelStages, layer_spans
from tests.gpu.ranks import found_by_ranks
from tests.largest import largest
from tests.parallel.models import config_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error
from tests.parallel.test_pipeline import Recorded, loss_of_run

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "vocab_size": 1000}


def errors(world: World) -> dict[str, float]:
    """The largest error of this rank for each family and schedule."""
    mesh = Mesh.of(world, {"pp": world.size})
    found = {}
    for family in ("llama", "qwen3-biases-tied"):
        config = config_of(family, num_hidden_layers=2 * world.size + 1, **SIZES)
        batches = []
        for index in range(2 * world.size):
            batch, targets = random_batch(config, [60 + index, 4], seed=index)
            moved = Batch(*(one.to(world.device) for one in (batch.tokens, batch.positions, batch.offsets)), 60 + index)
            rows = (targets != -100).nonzero().flatten()
            on_device = rows.to(world.device), targets[rows].to(world.device)
            batches.append(MicroBatch(moved, *on_device, torch.ones((), device=world.device), mesh.axis("cp")))
        counted = sum(len(one.targets) for one in batches)
        whole = random_model(config, torch.float32).to(world.device)
        wanted = torch.zeros((), device=world.device)
        for one in batches:
            targets = torch.full(one.batch.tokens.shape, -100, device=world.device)
            targets[one.rows] = one.targets
            wanted = wanted + loss_of(whole, one.batch, targets)
        (wanted / counted).backward()
        for name in SCHEDULES:
            schedule = make_schedule(name, world.size, len(batches))
            model = random_model(config, torch.float32).to(world.device)
            part = ModelStages(model, layer_spans(model, schedule.stages, 64), schedule.stages_of(world.rank))
            loss = loss_of_run(Pipeline(part, schedule, mesh), batches, counted, Recorded())
            apart = [relative_error(loss, wanted / counted)]
            for key, parameter in part.named_parameters():
                assert parameter.grad is not None, key
                gradient = whole.get_parameter(key).grad
                assert gradient is not None, key
                apart.append(relative_error(parameter.grad, gradient))
            found[f"{family} {name}"] = largest(apart)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_equal_one_gpu(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=240):
        assert len(found) == 2 * len(SCHEDULES)
        assert largest(found.values()) < 1e-3, found


def main() -> None:
    """One rank."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with join_world("cuda", timeout_seconds=120) as world:
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(errors(world)))


if __name__ == "__main__":
    main()
