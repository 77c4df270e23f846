"""Pipelines against one process in float64: loss and every gradient, for each schedule, with data and tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.kernels.rotary.rope import rope_angles
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.parallel.layout import Layout
from strata.parallel.loss import MicroBatch
from strata.parallel.parallelize import parallelize
from strata.parallel.pipeline import Pipeline
from strata.parallel.schedules import SCHEDULES, PipelineSchedule, make_schedule
from strata.parallel.split_backward import backward_of_inputs
from strata.parallel.stages import ModelStages, balance, layer_spans
from strata.train.steps.objective import NextToken
from tests.largest import largest
from tests.parallel.models import config_of, head_weight, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks

FAMILIES = {"llama": "untied", "qwen3-biases-tied": "tied"}


class Recorded:
    """`Gradients` that stay where autograd puts them; counts what a pipeline tells."""

    def __init__(self) -> None:
        self.shards: Sequence[Any] = ()
        self.calls: list[str] = []

    def set_is_last_backward(self) -> None:
        self.calls.append("last")

    def accumulate(self) -> None:
        self.calls.append("pass")


def micro_batches(config: ModelConfig, count: int, first: int = 0) -> list[MicroBatch]:
    """Of different numbers of tokens, sequences and targets."""
    found = []
    for index in range(first, first + count):
        batch, targets = random_batch(config, [3 + index % 4, 1, 5 + index % 3], seed=index)
        rows = (targets != -100).nonzero().flatten()[index % 2 :]
        found.append(MicroBatch(batch, rows, targets[rows], torch.ones(()), alone().axis("cp")))
    return found


def loss_of_run(pipeline: Pipeline, batches: Sequence[MicroBatch], counted: int, gradients: Any) -> Tensor:
    """Of the next token, the share of these batches of a step that counts so many."""
    weight = next(pipeline.model.parameters())
    scale = torch.tensor(1 / counted, dtype=weight.dtype, device=weight.device)
    (loss,) = pipeline.run([replace(one, scale=scale) for one in batches], NextToken(), gradients)
    return loss


def targets_of(batches: Sequence[MicroBatch]) -> int:
    return sum(len(one.targets) for one in batches)


def one_process(config: ModelConfig, batches: Sequence[MicroBatch]) -> tuple[CausalLM, Tensor]:
    """The model with its gradients, and the loss."""
    model = random_model(config)
    total = torch.zeros((), dtype=torch.float64)
    for one in batches:
        targets = torch.full(one.batch.tokens.shape, -100)
        targets[one.rows] = one.targets
        total = total + loss_of(model, one.batch, targets)
    loss = total / targets_of(batches)
    loss.backward()
    return model, loss.detach()


def part_of(config: ModelConfig, schedule: PipelineSchedule, rank: int) -> ModelStages:
    model = random_model(config)
    return ModelStages(model, layer_spans(model, schedule.stages, 8), schedule.stages_of(rank))


def every_schedule(world: World, folder: Path) -> dict[str, Any]:
    mesh = Mesh.of(world, {"pp": world.size})
    found: dict[str, Any] = {}
    for family in FAMILIES:
        config = config_of(family, num_hidden_layers=2 * world.size + 1)
        batches = micro_batches(config, 2 * world.size)
        whole, wanted = one_process(config, batches)
        for name in SCHEDULES:
            schedule = make_schedule(name, world.size, len(batches))
            part = part_of(config, schedule, world.rank)
            captured = Recorded()
            pipeline = Pipeline(part, schedule, mesh)
            losses = [loss_of_run(pipeline, batches, targets_of(batches), captured) for _ in range(2)]
            gradients = {key: parameter.grad for key, parameter in part.named_parameters()}
            found[f"{family} {name}"] = {
                "loss": largest(relative_error(loss, wanted) for loss in losses),
                # Two steps were run, and nobody took the gradients of the first.
                "gradient": largest(
                    relative_error(gradient, 2 * whole.get_parameter(key).grad) for key, gradient in gradients.items()
                ),
                "names": list(gradients),
                "calls": captured.calls[: len(captured.calls) // 2],
            }
    return found


def products(world: World, folder: Path) -> dict[str, Any]:
    """Two stages times two ranks along another axis."""
    found: dict[str, Any] = {}
    for number, layout in enumerate(
        (
            Layout(pp=2, dp=2),
            Layout(pp=2, shard=2, zero=1),
            Layout(pp=2, shard=2, zero=2),
            Layout(pp=2, shard=2, zero=3),
            Layout(pp=2, tp=2),
            Layout(pp=2, tp=2, sequence_parallel=True),
        )
    ):
        mesh = layout.mesh(world)
        for turn, name in enumerate(SCHEDULES):
            if layout.zero == 3 and "zero-bubble" in name:
                continue
            family = "llama" if layout.zero == 3 else [*FAMILIES][(number + turn) % 2]
            found[f"{layout} {name}"] = against_one_process(mesh, layout, family, 4, name)
    return found


def against_one_process(mesh: Mesh, layout: Layout, family: str, layers: int, schedule_name: str) -> dict[str, Any]:
    """Loss and gradients of a step of this rank, and what they should be."""
    replica = mesh.flattened("dp", "shard")
    config = config_of(family, num_hidden_layers=layers)
    per_replica = [micro_batches(config, 4, 4 * index) for index in range(replica.size)]
    everything = [one for batches in per_replica for one in batches]
    whole, wanted = one_process(config, everything)
    schedule = make_schedule(schedule_name, 2, 4)
    part = part_of(config, schedule, mesh.axis("pp").index)
    parallel = parallelize(part, config, layout, mesh, bucket_elements=1000)
    pipeline = Pipeline(part, schedule, mesh, sequence_parallel=layout.sequence_parallel)
    loss = loss_of_run(pipeline, per_replica[replica.index], targets_of(everything), parallel.gradients)
    parallel.gradients.reduce()
    norm = parallel.gradients.norm()
    errors = []
    for one in parallel.gradients.shards:
        full = parallel.sharding.shard(one.name, whole.get_parameter(one.name).grad)
        held = one.master.grad.flatten()
        wanted_part = full.flatten()[one.start : one.start + held.numel()]
        errors.append(float((held - wanted_part).abs().max() / full.abs().max()))
    return {
        "loss": float(loss),
        "wanted": float(wanted),
        "replica": replica.index,
        "gradient": largest(errors),
        "norm": relative_error(norm, norm_of(whole)),
    }


def experts_on_one_stage(world: World, folder: Path) -> dict[str, Any]:
    """FSDP needs groups for experts that the stage without any needs not; then a second mesh."""
    divided, second = Layout(pp=2, shard=2, ep=2, zero=3), Layout(pp=2, shard=2, zero=1)
    return {
        "divided": against_one_process(divided.mesh(world), divided, "qwen3-moe", 2, "1f1b"),
        "second": against_one_process(second.mesh(world), second, "llama", 2, "1f1b"),
    }


def check_products(ranks: Sequence[dict[str, Any]]) -> None:
    for key in ranks[0]:
        found = [rank[key] for rank in ranks]
        shares = {one["replica"]: one["loss"] for one in found}
        assert sum(shares.values()) == pytest.approx(found[0]["wanted"], rel=1e-9), key
        assert largest(one["gradient"] for one in found) < 1e-9, (key, found)
        assert largest(one["norm"] for one in found) < 1e-9, (key, found)


def test_a_stage_without_experts_makes_the_groups_of_those_that_have_some(tmp_path: Path) -> None:
    check_products(run_ranks(experts_on_one_stage, 4, tmp_path))


def norm_of(model: CausalLM) -> Tensor:
    return torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()


def four_ranks(world: World, folder: Path) -> dict[str, Any]:
    return two_ranks(world, folder) | {"products": products(world, folder)}


def two_ranks(world: World, folder: Path) -> dict[str, Any]:
    return {"schedules": every_schedule(world, folder)}


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_gradients_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(two_ranks if world == 2 else four_ranks, world, tmp_path)
    for family in FAMILIES:
        whole = random_model(config_of(family, num_hidden_layers=2 * world + 1))
        names = sorted(name for name, _ in whole.named_parameters())
        for schedule in SCHEDULES:
            found = [rank["schedules"][f"{family} {schedule}"] for rank in ranks]
            assert largest(one["loss"] for one in found) < 1e-9, (family, schedule, found)
            assert largest(one["gradient"] for one in found) < 1e-9, (family, schedule, found)
            # Every parameter lies on one rank, under its name.
            assert sorted(name for one in found for name in one["names"]) == names
            for one in found:
                assert one["calls"].count("last") == 1
                assert one["calls"][-2:] == ["last", "pass"]
    if world == 4:
        check_products([rank["products"] for rank in ranks])


def alone() -> Mesh:
    return Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_needs_no_other(name: str, family: str) -> None:
    config = config_of(family, num_hidden_layers=3)
    batches = micro_batches(config, 3)
    whole, wanted = one_process(config, batches)
    schedule = make_schedule(name, 1, 3)
    part = part_of(config, schedule, 0)
    loss = loss_of_run(Pipeline(part, schedule, alone()), batches, targets_of(batches), Recorded())
    assert relative_error(loss, wanted) < 1e-12
    for key, parameter in part.named_parameters():
        assert relative_error(parameter.grad, whole.get_parameter(key).grad) < 1e-12, key


def test_a_backward_pass_in_two_parts_computes_nothing_twice() -> None:
    config = config_of("qwen3-biases-tied", tie_word_embeddings=False)
    batch, targets = random_batch(config, [9, 1, 13])

    def loss_from(model: CausalLM) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        given = torch.randn(23, config.hidden_size, dtype=torch.float64, generator=generator).requires_grad_()
        cos, sin = rope_angles(batch.positions, model.model.rotary.table)
        hidden = given
        for layer in model.model.layers:
            hidden = layer(hidden, batch, cos, sin)
        hidden = model.model.norm(hidden)
        return given, torch.nn.functional.cross_entropy(hidden @ head_weight(model).t(), targets, reduction="sum")

    whole, split = random_model(config), random_model(config)
    given, loss = loss_from(whole)
    with FlopCounterMode(display=False) as flops_of_whole:
        loss.backward()
    given_again, loss = loss_from(split)
    with FlopCounterMode(display=False) as flops_of_split:
        gradient, left = backward_of_inputs(get_gradient_edge(loss), torch.ones_like(loss), given_again)
        assert not left.has_begun
        assert all(parameter.grad is None for parameter in split.parameters())
        left.run()
    assert torch.equal(gradient, given.grad)
    for name, parameter in split.named_parameters():
        if "embed" not in name:
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name
    assert flops_of_split.get_total_flops() == flops_of_whole.get_total_flops()


def test_a_weight_that_is_used_twice_is_refused_when_the_backward_pass_is_split() -> None:
    weight, given = torch.eye(3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    output = ((given @ weight) @ weight).sum()
    with pytest.raises(ValueError, match="a weight is used twice in one stage; choose a schedule"):
        backward_of_inputs(get_gradient_edge(output), torch.ones(()), given)


@pytest.mark.parametrize(
    ("costs", "parts", "wanted"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 1], 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ([1, 1, 1, 1, 1, 1, 1, 3.5], 4, [(0, 3), (3, 5), (5, 7), (7, 8)]),
        ([1, 1, 1], 3, [(0, 1), (1, 2), (2, 3)]),
        ([5, 1, 1, 1, 1, 1], 2, [(0, 1), (1, 6)]),
        ([2], 1, [(0, 1)]),
    ],
)
def test_stages_cost_alike(costs: list[float], parts: int, wanted: list[tuple[int, int]]) -> None:
    found = balance(costs, parts)
    assert [end for _, end in found[:-1]] == [first for first, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, len(costs))
    assert sorted(sum(costs[a:b]) for a, b in found) == sorted(sum(costs[a:b]) for a, b in wanted)


def test_the_head_weighs_as_much_as_the_layers_it_costs() -> None:
    config = config_of("llama", num_hidden_layers=6, vocab_size=2000)
    with torch.device("meta"):
        model = build(config)
    spans = layer_spans(model, 2, 8)
    # A layer has 24 * (32 + 16 + 16) + 32 * 24 + 3 * 24 * 37 = 4968 elements, the head 48000.
    assert spans == [(0, 5), (5, 6)]


def test_what_does_not_fit_is_refused() -> None:
    config = config_of("llama", num_hidden_layers=3)
    model = random_model(config)
    with pytest.raises(ValueError, match="4 stages exceed the 3 layers of the model"):
        layer_spans(model, 4, 8)
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="the schedule is for 2 ranks, but pp = 1"):
        Pipeline(part_of(config, schedule, 0), schedule, alone())
    schedule = make_schedule("interleaved", 1, 2)
    with pytest.raises(ValueError, match=r"this rank holds the stages \(0,\) of 1, but the schedule gives it \(0, 1\)"):
        Pipeline(ModelStages(model, [(0, 3)], [0]), schedule, alone())
    pipeline = Pipeline(part_of(config, schedule, 0), schedule, alone())
    with pytest.raises(ValueError, match="3 micro-batches, but the schedule is for 2"):
        pipeline.run(micro_batches(config, 3), NextToken(), Recorded())
