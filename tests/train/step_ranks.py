"""Training steps of the ranks of a layout against one process that knows nothing of layouts, in float64."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strata.comm.launch import World
from strata.comm.observer import CollectiveCall
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.checkpoints.state import StateShard
from strata.train.data.pack import PackedBatch
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps.make import make_step
from strata.train.steps.parallel_step import ParallelStep
from strata.train.steps.recorded import shape_of_all
from tests.largest import name_of_largest
from tests.parallel.models import config_of, loss_of, random_model
from tests.parallel.ranks import relative_error

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, clip=0.05)  # far below the norms, so that clipping acts
STEPS = 3
PACKS = 2


def pack_of(seed: int, lengths: list[int], vocab: int, share: float) -> PackedBatch:
    """Random tokens, a share of which the loss counts; 0 for none at all."""
    draw = np.random.default_rng(seed)
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int32)
    tokens = draw.integers(0, vocab, offsets[-1], dtype=np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    inner = np.setdiff1d(np.arange(offsets[-1]), offsets[1:] - 1)
    rows = inner[draw.random(len(inner)) < share]
    return PackedBatch(tokens, positions, offsets, rows, tokens[rows + 1].astype(np.int64))


def packs_of(config: ModelConfig, step: int, replica: int) -> list[PackedBatch]:
    """Other numbers of tokens on every replica. No token counts in the second pack of the first replica, nor in any of
    the second replica in step 1.
    """
    none = {(0, 0, 1), (1, 0, 1), (2, 0, 1), (1, 1, 0), (1, 1, 1)}
    return [
        pack_of(
            100 * step + 10 * replica + micro,
            [5 + replica, 1 + micro, 7],
            config.vocab_size,
            0.0 if (step, replica, micro) in none else 0.7,
        )
        for micro in range(PACKS)
    ]


def plain_loss(model: CausalLM, packs: list[PackedBatch]) -> Tensor:
    """The mean over the counted tokens of all packs, [] with its gradient."""
    counted = sum(len(one.targets) for one in packs)
    total = torch.zeros((), dtype=torch.float64)
    for one in packs:
        batch, rows, wanted = one.to(torch.device("cpu"))
        targets = torch.full(batch.tokens.shape, -100)
        targets[rows] = wanted
        total = total + loss_of(model, batch, targets) / counted
    return total


def one_process(config: ModelConfig, replicas: int, steps: int) -> tuple[CausalLM, list[float], list[float]]:
    """The model after the steps, losses and norms, by plain PyTorch."""
    model = random_model(config)
    named = dict(model.named_parameters())
    decayed = {name for name, one in named.items() if one.dim() > 1 and "embed_tokens" not in name}
    groups = [
        {"params": [named[name] for name in named if (name in decayed) == flag], "weight_decay": decay}
        for flag, decay in ((True, OPTIMIZER.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        total = plain_loss(model, [one for replica in range(replicas) for one in packs_of(config, step, replica)])
        total.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)))
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model, losses, norms


def rate_of(step: int) -> float:
    return OPTIMIZER.learning_rate / (step + 1)


def made(world: World, config: ModelConfig, layout: Layout, **options: Any) -> tuple[ParallelStep, int, int]:
    """The step, the number of replicas, and which one this rank belongs to."""
    mesh = layout.mesh(world)
    documents = mesh.flattened("dp", "shard")
    source = random_model(config)
    step = make_step(
        config, layout, mesh, OPTIMIZER, lambda *_: source.named_parameters(), dtype=torch.float64, **options
    )
    return step, documents.size, documents.index


def errors_of(world: World, family: str, layout: Layout, **options: Any) -> dict[str, float]:
    """Largest relative errors of losses, norms and masters after some steps, each measured before it is done."""
    stages = layout.pp * (2 if layout.schedule == "interleaved" else 1)
    config = config_of(family, num_hidden_layers=max(2, stages))
    step, replicas, own = made(world, config, layout, **options)
    model, losses, norms = one_process(config, replicas, STEPS)
    errors: dict[str, float] = {}
    for index in range(STEPS):
        step.sync_weights()
        measured = step.measured(packs_of(config, index, own))
        errors[f"measured {index}"] = abs(float(measured["loss"]) / losses[index] - 1)
        result = step(packs_of(config, index, own), rate_of(index))
        errors[f"counted {index}"] = abs(float(measured["counted"] - result.metrics["counted"]))
        errors[f"loss {index}"] = abs(float(result.loss) / losses[index] - 1)
        errors[f"norm {index}"] = abs(float(result.norm) / norms[index] - 1)
    for shard in step.state_shards():
        if shard.kind == "master":
            errors[shard.name] = relative_error(shard.tensor.cpu(), of_whole(shard, model.get_parameter(shard.name)))
    return errors


def of_whole(shard: StateShard, whole: Tensor) -> Tensor:
    """The elements of a whole tensor that a shard holds."""
    box = whole.detach()[tuple(slice(*span) for span in shard.box)]
    return box.flatten()[shard.start : shard.start + shard.tensor.numel()]


def worst(world: World, folder: Path, layouts: list[list[Any]]) -> list[list[Any]]:
    """For every (family, layout, options): what differs most from one process, and by how much."""
    found = []
    for family, layout, options in layouts:
        errors = errors_of(world, family, Layout(**layout), **options)
        name = name_of_largest(errors)
        found.append([name, errors[name]])
    return found


def skipped_and_restored(world: World, folder: Path) -> dict[str, Any]:
    """A step with a gradient that is infinite on one rank alone; then another stepper goes on from the shards."""
    config, layout = config_of("llama"), Layout(shard=2, zero=2)
    called: list[int] = []
    step, _, own = made(world, config, layout, before_update=lambda: called.append(1))
    step(packs_of(config, 0, own), rate_of(0))
    before = [copy.deepcopy(shard.tensor) for shard in step.state_shards()]
    weight = step._passes._model.model.norm.weight  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda gradient: gradient * (float("inf") if world.rank else 1.0))
    skipped = step(packs_of(config, 1, own), rate_of(1))
    handle.remove()
    held = step.state_shards()
    same = all(torch.equal(shard.tensor, one) for shard, one in zip(held, before, strict=True))
    other, _, _ = made(world, config, layout)
    with torch.no_grad():
        for mine, shard in zip(other.state_shards(), held, strict=True):
            mine.tensor.copy_(shard.tensor)
    other.restored(2)
    results = [one(packs_of(config, 2, own), rate_of(2)) for one in (step, other)]
    step.sync_weights()
    return {
        "finite": bool(skipped.norm.isfinite()),
        "loss": float(skipped.loss),
        "counted": float(skipped.metrics["counted"]),
        "wanted": sum(len(one.targets) for replica in range(2) for one in packs_of(config, 1, replica)),
        "same": same,
        "kinds": sorted({shard.kind for shard in held}),
        "again": results[0].loss.equal(results[1].loss) and results[0].norm.equal(results[1].norm),
        "pieces": all(
            torch.equal(one.tensor, two.tensor)
            for one, two in zip(step.state_shards(), other.state_shards(), strict=True)
        ),
        "called": len(called),
    }


def shapes(world: World) -> list[list[int] | None]:
    """What ranks agree on that have the same shape, another length, and one of them none."""
    world_axis = all_ranks(Layout(dp=2).mesh(world))
    own = [(1, 2, 8), (1, 2, 8 + world.rank), None if world.rank else (1, 2, 8), (1 + world.rank, 2, 8)]
    return [None if found is None else list(found) for found in (shape_of_all(one, world_axis) for one in own)]


class Counting:
    """Of the collectives that were started along "tp", how many of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def started(self, operation: str, axis: str, ranks: tuple[int, ...], nbytes: int) -> CollectiveCall:
        if axis == "tp":
            self.counts[operation] += 1
        return CollectiveCall(operation, axis, ranks, self.counts[operation], nbytes)

    def waits(self, call: CollectiveCall | None) -> None:
        """Nobody asks."""


def repeated_messages(world: World, folder: Path, layouts: list[list[Any]]) -> list[list[dict[str, int]]]:
    """For every (family, layout): messages of a layer in one pack's passes that are there because all layers, or their
    MLPs, are computed again.
    """
    found = []
    for family, layout in layouts:
        config = config_of(family, num_hidden_layers=2)
        counts = []
        for recompute in ("none", "layers", "mlp"):
            counting = Counting()
            step, _, _ = made(replace(world, observer=counting), config, Layout(**layout), recompute=recompute)
            counting.counts.clear()
            step([pack_of(0, [5, 9], config.vocab_size, 1.0)], 1e-3)
            counts.append(counting.counts)
        found.append([{name: count // 2 for name, count in (one - counts[0]).items()} for one in counts[1:]])
    return found


def two_ranks(world: World, folder: Path, layouts: list[list[Any]]) -> dict[str, Any]:
    found = {"worst": worst(world, folder, layouts), "skipped": skipped_and_restored(world, folder)}
    return found | {"shapes": shapes(world)}


def four_ranks(world: World, folder: Path, layouts: list[list[Any]]) -> dict[str, Any]:
    return {"worst": worst(world, folder, layouts)}
