"""AdamW and Muon under every way of dividing parameters against one process; which rank has which matrix."""

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
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from strata.train.optimizer.muon_rounds import Holding, MatrixTransfer, Round, is_layer_matrix, make_rounds
from strata.train.optimizer.orthogonalize import orthogonalization_flops
from strata.train.optimizer.sharded_optimizer import clip_scale
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


NAME = "model.layers.0.mlp.up_proj.weight"


def holding(start: int, end: int, name: str = NAME, box: int = 0, **of_shard: object) -> Holding:
    values = {"experts": 0, "cut": 0, "shape": (6, 4)} | of_shard
    return Holding(name, box=box, start=start, end=end, **values)  # type: ignore[arg-type]


def told(transfers: tuple[MatrixTransfer, ...]) -> list[tuple[int, ...]]:
    return [(one.source, one.target, one.box, one.start, one.end) for one in transfers]


def owners(rounds: list[Round]) -> dict[tuple[str, int], int]:
    """By name and first element."""
    return {
        (stack.name, stack.boxes[0].start): rank
        for one in rounds
        for rank, batch in enumerate(one.batches)
        for stack in batch
    }


def test_which_parameters_are_matrices_of_layers() -> None:
    assert is_layer_matrix("model.layers.11.self_attn.q_proj.weight", (8, 8))
    assert is_layer_matrix("model.layers.0.mlp.experts.down_proj", (4, 8, 8))
    assert is_layer_matrix("model.layers.0.mlp.gate.weight", (4, 8))
    for name, shape in (
        ("model.embed_tokens.weight", (9, 8)),
        ("lm_head.weight", (9, 8)),
        ("model.layers.0.self_attn.q_proj.bias", (8,)),
        ("model.norm.weight", (8,)),
    ):
        assert not is_layer_matrix(name, shape)


def test_flops_of_an_orthogonalization() -> None:
    # x x^T and the last product: 2 * 2 * 3 * 7 each; the square of 2 x 2... of 3 x 3: 2 * 27.
    assert orthogonalization_flops(3, 7) == orthogonalization_flops(7, 3) == 5 * (2 * 2 * 3 * 3 * 7 + 2 * 27)


def test_parts_go_to_one_owner_and_back() -> None:
    (found,) = make_rounds([[holding(0, 10)], [holding(10, 24)]])
    assert told(found.gathered) == [(0, 0, 0, 0, 10), (1, 0, 0, 10, 24)]
    assert told(found.returned) == [(0, 0, 0, 0, 10), (0, 1, 0, 10, 24)]


def test_copies_are_sent_once_and_returned_to_all() -> None:
    """Two replicas of two ranks: what the owner's replica holds does not come from the other."""
    replica = [[holding(0, 10)], [holding(10, 24)]]
    (found,) = make_rounds([*replica, *replica])
    assert told(found.gathered) == [(0, 0, 0, 0, 10), (1, 0, 0, 10, 24)]
    assert sorted(told(found.returned)) == [(0, 0, 0, 0, 10), (0, 1, 0, 10, 24), (0, 2, 0, 0, 10), (0, 3, 0, 10, 24)]


def test_shards_of_columns_become_one_matrix() -> None:
    shards = [
        [holding(0, 12, cut=1, shape=(6, 2))],
        [holding(0, 18, box=1, cut=1, shape=(6, 3))],
    ]
    (found,) = make_rounds(shards)
    (stack,) = found.batches[0]
    assert stack.shape == (6, 5)
    assert [(box.rows, box.columns) for box in stack.boxes] == [((0, 6), (0, 2)), ((0, 6), (2, 5))]
    assert told(found.gathered) == [(0, 0, 0, 0, 12), (1, 0, 1, 0, 18)]


def test_experts_are_shared_out_in_stacks() -> None:
    """Three experts of gate and up, [3, 4, 5]: six matrices of 2 x 5, three to each rank; a part ends within one."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [[holding(0, 36, name, cut=None, shape=(3, 4, 5))], [holding(36, 60, name, cut=None, shape=(3, 4, 5))]]
    (found,) = make_rounds(parts)
    stacks = [stack for batch in found.batches for stack in batch]
    assert [(stack.count, stack.shape, stack.boxes[0].start) for stack in stacks] == [(3, (2, 5), 0), (3, (2, 5), 30)]
    assert told(found.gathered) == [(0, 0, 0, 0, 30), (0, 1, 0, 0, 6), (1, 1, 0, 6, 30)]


def test_work_is_even() -> None:
    """A layer of each rank's own would be uneven: 3 layers on 4 ranks."""
    shapes = {"q_proj": (64, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 64)}
    shapes |= {"gate_proj": (256, 64), "up_proj": (256, 64), "down_proj": (64, 256)}
    everything = [
        holding(0, rows * columns, f"model.layers.{layer}.{name}.weight", shape=(rows, columns))
        for layer in range(3)
        for name, (rows, columns) in shapes.items()
    ]
    rounds = make_rounds([everything] * 4, batch_elements=2 * 64 * 256)
    work = [sum(stack.flops for one in rounds for stack in one.batches[rank]) for rank in range(4)]
    assert len(owners(rounds)) == len(everything)
    assert max(work) < 1.1 * sum(work) / 4
    for one in rounds:
        for batch in one.batches:
            assert len({stack.shape for stack in batch}) <= 1
            assert sum(stack.elements for stack in batch) <= 2 * 64 * 256
        # Every rank holds all: nothing has to travel to an owner.
        assert all(transfer.source == transfer.target for transfer in one.gathered)


def test_a_matrix_that_is_not_held_whole_is_told() -> None:
    for parts in ([[holding(0, 10)], [holding(11, 24)]], [[holding(0, 10)], [holding(9, 24)]], [[holding(0, 23)]]):
        with pytest.raises(ValueError, match=f"the ranks do not hold all of {NAME} once"):
            make_rounds(parts)
    with pytest.raises(ValueError, match=f"the ranks do not hold all of {NAME};"):
        make_rounds([[holding(0, 24, box=1)]])


def test_a_model_without_matrices_has_no_rounds() -> None:
    assert make_rounds([[], []]) == []
