"""Training steps of the ranks of a layout against one process that knows nothing of layouts, in float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from strata.comm.launch import World
from strata.comm.observer import CollectiveCall
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.adapters.lora import LoraConfig, first_values
from strata.train.checkpoints.state import StateShard
from strata.train.data.pack import PackedBatch, Samples
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps import make
from strata.train.steps.captured import shape_of_all
from strata.train.steps.make import Adapters, make_step
from strata.train.steps.parallel_step import ParallelStep
from tests.largest import name_of_largest
from tests.parallel.models import config_of, random_model
from tests.parallel.ranks import relative_error
from tests.train.plain_losses import OBJECTIVES, plain_logprobs, plain_loss

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
    numbers = seed + np.arange(len(lengths) // 2)
    samples = Samples(numbers, np.zeros_like(numbers), numbers, len(tokens))
    return PackedBatch(tokens, positions, offsets, rows, tokens[rows + 1].astype(np.int64), samples)


def packs_of(config: ModelConfig, step: int, replica: int, *, even: bool = False) -> list[PackedBatch]:
    """Other numbers of tokens on every replica, if asked all of them even. No token counts in the second pack of the
    first replica, nor in any of the second replica in step 1.
    """
    lengths = [[5 + replica, 1 + micro, 7, 4] for micro in range(PACKS)]
    none = {(0, 0, 1), (1, 0, 1), (2, 0, 1), (1, 1, 0), (1, 1, 1)}
    return [
        pack_of(
            100 * step + 10 * replica + micro,
            [*lengths[micro][:-1], lengths[micro][-1] + even * sum(lengths[micro]) % 2],
            config.vocab_size,
            0.0 if (step, replica, micro) in none else 0.7,
        )
        for micro in range(PACKS)
    ]


@dataclass(frozen=True)
class Plain:
    """Steps of one process. trained: the parameters after them. logprobs: of the first pack of each step before it."""

    trained: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    logprobs: list[Tensor]


def one_process(
    steps: Sequence[Sequence[PackedBatch]], config: ModelConfig, loss: str, lora: LoraConfig | None
) -> Plain:
    """By plain PyTorch. steps: the packs of each, of all replicas."""
    model = random_model(config)
    named = dict(model.named_parameters()) if lora is None else random_adapters(model, lora)
    optimizer = plain_adamw(named)
    found = Plain(named, [], [], [])
    for step, packs in enumerate(steps):
        weights = named if lora is None else with_adapters(model, named, lora)
        logprobs = [plain_logprobs(model, weights, one) for one in packs]
        total = plain_loss(loss, logprobs, packs)
        found.norms.append(plain_update(optimizer, total, named, step))
        found.losses.append(total.item())
        found.logprobs.append(logprobs[0].detach())
    return found


def plain_adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    decayed = {name for name, one in named.items() if one.dim() > 1 and "embed_tokens" not in name}
    groups = [
        {"params": [named[name] for name in named if (name in decayed) == flag], "weight_decay": decay}
        for flag, decay in ((True, OPTIMIZER.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=(0.9, 0.95), eps=1e-8)


def plain_update(optimizer: torch.optim.AdamW, total: Tensor, named: Mapping[str, nn.Parameter], step: int) -> float:
    """The backward pass of a loss and the update. Returns the norm before clipping."""
    total.backward()
    norm = float(nn.utils.clip_grad_norm_(named.values(), OPTIMIZER.clip))
    for group in optimizer.param_groups:
        group["lr"] = rate_of(step)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def random_adapters(model: CausalLM, lora: LoraConfig) -> dict[str, nn.Parameter]:
    """By name, whole: B too is not zero, so that A has a gradient."""
    draw = torch.Generator().manual_seed(9)
    return {
        name: nn.Parameter(0.3 * torch.randn(value.shape, generator=draw, dtype=torch.float64))
        for name, value in first_values(model, lora, 0)
    }


def with_adapters(model: CausalLM, adapters: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights W + s B A that adapters come to."""
    made = {name: one.detach() for name, one in model.named_parameters()}
    for name, a in adapters.items():
        if name.endswith("lora_A.weight"):
            base = name.replace("lora_A.", "")
            made[base] = made[base] + lora.alpha / lora.rank * adapters[name.replace("lora_A", "lora_B")] @ a
    return made


def rate_of(step: int) -> float:
    return OPTIMIZER.learning_rate / (step + 1)


def made(
    world: World, config: ModelConfig, layout: Layout, lora: LoraConfig | None = None, **options: Any
) -> tuple[ParallelStep, int, int]:
    """The step, the number of replicas, and which one this rank belongs to."""
    mesh = layout.mesh(world)
    documents = mesh.flattened("dp", "shard")
    source = random_model(config)
    named = dict(source.named_parameters()) | ({} if lora is None else random_adapters(source, lora))
    adapters = None if lora is None else Adapters(lora)
    step = make_step(
        config,
        layout,
        mesh,
        OPTIMIZER,
        lambda *_: named.items(),
        adapters=adapters,
        **{"dtype": torch.float64} | options,
    )
    return step, documents.size, documents.index


def errors_of(
    world: World,
    family: str,
    layout: Layout,
    *,
    loss: str = "next token",
    projections: Sequence[str] = (),
    even: bool = False,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Largest relative errors of losses, norms, log-probabilities and masters after some steps, each measured before it
    is done. loss: one of `OBJECTIVES`. projections: which get adapters; none: the whole model is trained. changes: of
    the family's config.
    """
    stages = layout.pp * (2 if layout.schedule == "interleaved" else 1)
    config = config_of(family, num_hidden_layers=max(2, stages), **changes or {})
    lora = LoraConfig(3, 6.0, list(projections)) if projections else None
    step, replicas, own = made(world, config, layout, lora, objective=OBJECTIVES[loss], **options)
    by_step = [[packs_of(config, index, replica, even=even) for replica in range(replicas)] for index in range(STEPS)]
    plain = one_process([list(chain(*packs)) for packs in by_step], config, loss, lora)
    errors: dict[str, float] = {}
    for index in range(STEPS):
        step.sync_weights()
        packs = by_step[index][own]
        measured = step.measured(packs)
        errors[f"measured {index}"] = abs(float(measured["loss"]) / plain.losses[index] - 1)
        if own == 0:
            errors[f"logprobs {index}"] = relative_error(step.logprobs(packs)[0], plain.logprobs[index])
        else:
            step.logprobs(packs)
        result = step(packs, rate_of(index))
        for name in ("counted", *OBJECTIVES[loss].metrics):
            errors[f"{name} {index}"] = abs(float(measured[name] - result.metrics[name]))
        errors[f"loss {index}"] = abs(float(result.loss) / plain.losses[index] - 1)
        errors[f"norm {index}"] = abs(float(result.norm) / plain.norms[index] - 1)
    held = [shard for shard in step.state_shards() if shard.kind == "master"]
    assert {shard.name for shard in held} <= plain.trained.keys()
    for shard in held:
        errors[shard.name] = relative_error(shard.tensor.cpu(), of_whole(shard, plain.trained[shard.name]))
    return errors


def of_whole(shard: StateShard, whole: Tensor) -> Tensor:
    """The elements of a whole tensor that a shard holds."""
    box = whole.detach()[tuple(slice(*span) for span in shard.box)]
    return box.flatten()[shard.start : shard.start + shard.tensor.numel()]


def worst(
    world: World, layouts: list[list[Any]], errors_of: Callable[..., dict[str, float]] = errors_of
) -> list[list[Any]]:
    """For every (family, ..., layout, options): what differs most from one process, and by how much."""
    found = []
    for *named, layout, options in layouts:
        errors = errors_of(world, *named, Layout(**layout), **options)
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


def narrow(world: World) -> dict[str, float]:
    """Of layouts with adapters beside weights in bfloat16, as on a GPU, how far the first loss is from that of one
    process in float64, relative.
    """
    found = {}
    lora = LoraConfig(3, 6.0, ["q_proj", "o_proj", "down_proj"])
    layouts = [Layout(dp=2), Layout(shard=2, zero=3), Layout(tp=2, sequence_parallel=True), Layout(cp=2)]
    config = config_of("qwen3-biases-tied")
    with patch.object(make, "compute_dtype_on", lambda *_: torch.bfloat16):
        for layout in (*layouts, Layout(pp=2, micro_batches=2)):
            step, replicas, own = made(world, config, layout, lora, objective=OBJECTIVES["dpo"], dtype=torch.float32)
            packs = [packs_of(config, 0, replica) for replica in range(replicas)]
            result = step(packs[own], rate_of(0))
            assert result.norm > 0
            plain = one_process([list(chain(*packs))], config, "dpo", lora)
            found[str(layout)] = abs(float(result.loss) / plain.losses[0] - 1)
    return found


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
    found = {"worst": worst(world, layouts), "skipped": skipped_and_restored(world, folder)}
    return found | {"shapes": shapes(world), "narrow": narrow(world)}


def four_ranks(world: World, folder: Path, layouts: list[list[Any]]) -> dict[str, Any]:
    return {"worst": worst(world, layouts)}
