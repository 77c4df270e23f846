"""Layouts over NCCL against one process: steps of AdamW and Muon, ring attention, pipelines of every schedule."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.kernels.attention.partial import VisibleKeys, partial_attention, partial_attention_gradients
from strata.models.batch import Batch
from strata.parallel.context_ring import RingSteps, ring_attention
from strata.parallel.layout import Layout
from strata.parallel.loss import MicroBatch
from strata.parallel.pipeline import Pipeline
from strata.parallel.schedules import SCHEDULES, make_schedule
from strata.parallel.stages import ModelStages, layer_spans
from strata.parallel.zigzag import Zigzag
from tests.gpu.ranks import found_by_ranks
from tests.largest import largest
from tests.parallel.models import config_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error
from tests.parallel.steps import steps_of_ranks
from tests.parallel.test_pipeline import Recorded, loss_of_run
from tests.train.optimizer.test_optimizer_layouts import steps_against_one_process

pytestmark = pytest.mark.gpu

OF_FIVE_STEPS = {
    2: [
        ("llama-biases-tied", Layout(dp=2)),
        ("qwen3-biases-tied", Layout(shard=2, zero=1)),
        ("llama", Layout(shard=2, zero=2)),
        ("llama", Layout(shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(tp=2)),
        ("llama-biases-tied", Layout(tp=2, sequence_parallel=True)),
        ("llama", Layout(cp=2, zero=1)),
        ("mixtral", Layout(shard=2, ep=2, zero=2)),
    ],
    4: [
        ("llama", Layout(dp=2, shard=2, zero=2)),
        ("qwen2", Layout(dp=2, shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True)),
        ("llama", Layout(shard=2, tp=2, zero=3, sequence_parallel=True)),
        ("qwen3-biases-tied", Layout(cp=2, tp=2, context="ulysses", sequence_parallel=True)),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=3)),
    ],
}


def five_steps(world: World) -> list[Any]:
    return [steps_of_ranks(world, config_of(name), layout) for name, layout in OF_FIVE_STEPS[world.size]]


@pytest.mark.parametrize("ranks", OF_FIVE_STEPS)
def test_five_steps_equal_one_gpu(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(five_steps, ranks, tmp_path, timeout=300):
        for (name, layout), one in zip(OF_FIVE_STEPS[ranks], found, strict=True):
            assert one["worst"][1] < 1e-9, (name, layout, one)


OF_THREE_STEPS = {
    2: [
        ("llama-biases-tied", Layout(dp=2), "muon"),
        ("qwen3-biases-tied", Layout(shard=2, zero=1), "muon"),
        ("llama", Layout(shard=2, zero=3), "muon"),
        ("llama-biases-tied", Layout(tp=2), "muon"),
        ("mixtral", Layout(shard=2, ep=2, zero=2), "muon"),
        ("llama", Layout(shard=2, zero=2), "adamw"),
    ],
    4: [
        ("llama", Layout(dp=2, shard=2, zero=1), "muon"),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True), "muon"),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=3), "muon"),
    ],
}


def three_steps(world: World) -> list[Any]:
    return [steps_against_one_process(world, *one) for one in OF_THREE_STEPS[world.size]]


@pytest.mark.parametrize("ranks", OF_THREE_STEPS)
def test_three_steps_equal_one_gpu(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(three_steps, ranks, tmp_path, timeout=300):
        for (name, layout, optimizer), one in zip(OF_THREE_STEPS[ranks], found, strict=True):
            assert one["worst"][1] < 1e-9, (name, layout, optimizer, one)


# Documents that no number of ranks divides, one shorter than the ranks; one, and two, whose chunks are of one length.
BATCHES = ((1900, 1, 300, 37), (4096,), (2048, 2048))
HEADS, KV_HEADS, WIDTH = 8, 2, 64


def errors_of_ring(world: World, lengths: tuple[int, ...]) -> dict[str, float]:
    """Relative, of this rank's rows."""
    axis, device = Mesh.of(world, {"cp": world.size}).axis("cp"), world.device
    draw = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *given, slope = (torch.randn(*shape, generator=draw).bfloat16().to(device) for shape in shapes)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    whole = VisibleKeys(offsets, offsets, max(lengths), max(lengths), True)
    wide, scale = [one.double() for one in given], WIDTH**-0.5
    out, sums = partial_attention.reference(*wide, whole, scale)
    wanted = out, *partial_attention_gradients.reference(slope.double(), *wide, out, sums, whole, scale)

    division = Zigzag(lengths, world.size)
    rows = torch.tensor(division.rows(axis.index), device=device)
    leaves = [one[rows].requires_grad_() for one in given]
    mixed = ring_attention(*leaves, RingSteps(division, axis.index, device), axis, scale)
    mixed.backward(slope[rows])
    found = mixed.detach(), *(leaf.grad for leaf in leaves)
    return {
        f"{name} of {lengths}": ((mine.double() - exact[rows]).norm() / exact[rows].norm()).item()
        for name, mine, exact in zip(("out", "q", "k", "v"), found, wanted, strict=True)
    }


def ring(world: World) -> dict[str, float]:
    return {name: error for lengths in BATCHES for name, error in errors_of_ring(world, lengths).items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_equals_one_process(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(ring, ranks, tmp_path, timeout=200):
        assert len(found) == 4 * len(BATCHES)
        assert {name: error for name, error in found.items() if not error < 1e-2} == {}


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "vocab_size": 1000}


def pipelines(world: World) -> dict[str, float]:
    """The largest error of this rank for each family and schedule."""
    torch.backends.cuda.matmul.allow_tf32 = False
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
    for found in found_by_ranks(pipelines, ranks, tmp_path, timeout=240):
        assert len(found) == 2 * len(SCHEDULES)
        assert largest(found.values()) < 1e-3, found
