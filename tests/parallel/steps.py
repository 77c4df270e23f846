"""Some optimizer steps with micro-batches and clipping: of one process, and of the ranks of a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strata.comm.collectives import start_all_reduce
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.context import ContextBatch, divide_batch
from strata.parallel.layout import Layout
from strata.parallel.loss import vocabulary_cross_entropy
from strata.parallel.parallelize import Parallel, parallelize
from tests.largest import name_of_largest
from tests.parallel.models import head_weight, loss_of, moved, random_batch, random_model
from tests.parallel.ranks import relative_error

STEPS = 5
CLIP = 0.05  # far below the norms, so that clipping acts
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def lengths_of(rank: int, micro: int) -> list[int]:
    """The lengths of the sequences of a micro-batch: all ranks have different numbers of tokens."""
    return [5 + rank, 1 + micro, 7]


def batches(config: ModelConfig, step: int, replicas: int, device: torch.device) -> list[list[tuple[Batch, Tensor]]]:
    """Two micro-batches for each rank that sees documents of its own."""
    return [
        [
            moved(*random_batch(config, lengths_of(rank, micro), seed=100 * step + 10 * rank + micro), device)
            for micro in range(2)
        ]
        for rank in range(replicas)
    ]


def counted_tokens(work: list[list[tuple[Batch, Tensor]]]) -> int:
    return sum(int((targets >= 0).sum()) for row in work for _, targets in row)


def steps_of_one_process(
    config: ModelConfig, replicas: int, device: torch.device
) -> tuple[CausalLM, list[float], list[float]]:
    """The model after the steps; losses and gradient norms before clipping. Plain PyTorch throughout."""
    model = random_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        work = batches(config, step, replicas, device)
        total = sum(loss_of(model, *one) for row in work for one in row) / counted_tokens(work)
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model, losses, norms


def steps_of_ranks(world: World, config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """The same on this rank of the layout, against one process: largest relative errors; elements of its parts."""
    layout.check(config, world.size)
    mesh = layout.mesh(world)
    documents, tokens = mesh.flattened("dp", "shard"), mesh.flattened("dp", "shard", "cp")
    model = random_model(config).to(world.device)
    parallel = parallelize(model, config, layout, mesh, bucket_elements=1)  # a bucket a layer
    gradients = parallel.gradients
    optimizer = torch.optim.AdamW([part.master for part in gradients.shards], **ADAMW)
    wanted, losses, norms = steps_of_one_process(config, documents.size, world.device)
    errors: dict[str, float] = {}
    for step in range(STEPS):
        work = batches(config, step, documents.size, world.device)
        own = work[documents.index]
        if layout.cp > 1:
            own = [divided(one, lengths_of(documents.index, micro), layout, mesh) for micro, one in enumerate(own)]
        loss = accumulate(model, config, parallel, own, counted_tokens(work))
        errors[f"loss {step}"] = abs(float(start_all_reduce(loss, tokens).wait()) / losses[step] - 1)
        gradients.reduce()
        norm = gradients.norm()
        errors[f"norm {step}"] = abs(float(norm) / norms[step] - 1)
        for part in gradients.shards:
            assert part.master.grad is not None
            part.master.grad.mul_(min(1.0, CLIP / (float(norm) + 1e-6)))
        optimizer.step()
        gradients.sync_weights()
    errors |= weight_errors(model, parallel, wanted)
    batch, _ = moved(*random_batch(config, [6, 11], seed=7), world.device)
    with torch.no_grad():
        errors["hidden"] = relative_error(model(batch), wanted(batch))
    worst = name_of_largest(errors)
    elements = sum(part.master.numel() for part in gradients.shards)
    return {"worst": [worst, errors[worst]], "elements": elements, "smallest norm": min(norms)}


def divided(one: tuple[Batch, Tensor], lengths: list[int], layout: Layout, mesh: Mesh) -> tuple[Batch, Tensor]:
    """This rank's tokens along "cp"."""
    batch, targets = one
    part = divide_batch(batch, lengths, mesh.axis("cp"), layout.context)
    assert isinstance(part, ContextBatch)
    return part, targets[part.rows]


def accumulate(
    model: CausalLM, config: ModelConfig, parallel: Parallel, own: list[tuple[Batch, Tensor]], counted: int
) -> Tensor:
    """Forward and backward of this rank's micro-batches. Returns its share of the loss."""
    shares = []
    for micro, (batch, targets) in enumerate(own):
        if micro == len(own) - 1:
            parallel.gradients.set_is_last_backward()
        hidden, axis = model(batch), parallel.sharding.axis
        loss = vocabulary_cross_entropy(hidden, head_weight(model), targets, axis, config.vocab_size).sum() / counted
        loss.backward()
        parallel.gradients.accumulate()
        shares.append(loss.detach())
    return torch.stack(shares).sum()


def weight_errors(model: CausalLM, parallel: Parallel, wanted: CausalLM) -> dict[str, float]:
    """Of this rank's masters, and of the model's weights unless FSDP holds them."""
    errors = {}
    for part in parallel.gradients.shards:
        full = parallel.sharding.shard(part.name, wanted.get_parameter(part.name).detach())
        assert part.shape == full.shape
        held = full.flatten()[part.start : part.start + part.master.numel()]
        errors[f"{part.name} master"] = relative_error(part.master.detach().flatten(), held)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            errors[name] = relative_error(parameter, parallel.sharding.shard(name, wanted.get_parameter(name)))
    return errors
