"""AdamW and Muon over shards in one process: the formulas, steps that are skipped, weights, and state in the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.kernels.optimizer.adamw import Constants, adamw
from strata.kernels.optimizer.muon import muon_momentum, muon_update
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import ParameterShard
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel, parallelize
from strata.train.optimizer import make
from strata.train.optimizer.adamw import AdamW
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import ShardedOptimizer, make_optimizer
from strata.train.optimizer.memory import HostMemory
from strata.train.optimizer.orthogonalize import orthogonalize
from strata.train.optimizer.sharded_optimizer import clip_scale, joined
from tests.parallel.models import config_of, random_model
from tests.train.plain_optimizers import plain_step
from tests.train.samples import ALONE

RATE = 1e-2
ONE = torch.ones(())
Made = tuple[CausalLM, Parallel, ShardedOptimizer]


def of_one_process(
    model_name: str = "llama-biases-tied",
    dtype: torch.dtype = torch.float64,
    compute_dtype: torch.dtype | None = None,
    **settings: Any,
) -> Made:
    config, layout = config_of(model_name), Layout()
    mesh = layout.mesh(ALONE)
    model = random_model(config, dtype)
    parallel = parallelize(model, config, layout, mesh, compute_dtype=compute_dtype)
    chosen = OptimizerConfig(learning_rate=RATE, **settings)
    return model, parallel, make_optimizer(parallel.gradients.shards, chosen, mesh, parallel.sharding)


def draw_gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(one.shape, generator=generator, dtype=torch.float64) for name, one in model.named_parameters()
    }


def step(made: Made, number: int, scale: Tensor | float, gradients: dict[str, Tensor] | None = None) -> None:
    """The step of this number, from 1 on, with gradients drawn for it."""
    model, parallel, optimizer = made
    drawn = gradients or draw_gradients(model, number)
    for name, parameter in model.named_parameters():
        parameter.grad = drawn[name].to(parameter.dtype)
    parallel.gradients.accumulate()
    parallel.gradients.reduce()
    optimizer.begin(RATE / number)
    optimizer.update(torch.as_tensor(scale, dtype=torch.float64))
    parallel.gradients.sync_weights()


def everything(made: Made) -> list[Tensor]:
    """Copies of weights, masters and state."""
    model, parallel, optimizer = made
    masters = [shard.master.detach() for shard in parallel.gradients.shards]
    state = [one for tensors in optimizer.state().values() for one in tensors]
    return [one.detach().clone() for one in (*model.parameters(), *masters, *state)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("model_name", ["llama-biases-tied", "qwen3-moe"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_four_steps_are_those_of_the_papers(name: str, model_name: str) -> None:
    made = of_one_process(model_name, name=name, momentum=0.9)
    twin, state = random_model(config_of(model_name)), {}
    for number in range(1, 5):
        step(made, number, 0.5)
        for key, gradient in draw_gradients(twin, number).items():
            twin.get_parameter(key).grad = gradient
        settings = OptimizerConfig(learning_rate=RATE, name=name, momentum=0.9)
        plain_step(twin, state, settings, RATE / number, number, 0.5)
    for key, wanted in twin.named_parameters():
        torch.testing.assert_close(made[0].get_parameter(key), wanted, rtol=1e-10, atol=1e-12)
    shards, found = made[1].gradients.shards, made[2].state()
    for kind, tensors in found.items():
        for shard, tensor in zip(shards, tensors, strict=True):
            wanted = state.get(f"{kind}.{shard.name}", tensor.new_zeros(0))
            torch.testing.assert_close(tensor, wanted.flatten(), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_scale_zero_changes_nothing(name: str, bad: float) -> None:
    made = of_one_process("mixtral", torch.float32, torch.bfloat16, name=name)
    step(made, 1, 1.0)
    before = everything(made)
    step(made, 2, 0.0, {key: one.fill_(bad) for key, one in draw_gradients(made[0], 2).items()})
    assert same(everything(made), before)
    step(made, 3, 1.0)
    assert all(one.isfinite().all() for one in everything(made))
    assert not same(everything(made), before)


def test_skipped_operations_leave_everything_alone() -> None:
    held = [torch.randn(9) for _ in range(4)]
    before = [one.clone() for one in held]
    bad = torch.full((9,), float("nan"))
    adamw(*held, bad, torch.tensor([0.1, 0.1, 0.1, 0.0]), Constants(0.9, 0.95, 1e-8, 0.1))
    weight, master, momentum, _ = held
    result = muon_momentum(torch.ones(9), momentum, bad, torch.tensor([0.1, 0.0]), 0.95)
    muon_update(weight, master, bad, torch.tensor([0.1, 0.0]), 1.0, 0.1)
    assert same(held, before)
    assert not result.any()


def test_scale_is_one_below_the_clip_and_zero_where_nothing_is_finite() -> None:
    norms = torch.tensor([0.0, 0.5, 4.0, float("inf"), float("nan")])
    scales = [clip_scale(norm, 1.0).item() for norm in norms]
    assert scales == pytest.approx([1, 1, 0.25, 0, 0], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_are_rounded_masters_before_they_are_published(name: str) -> None:
    made = of_one_process("llama", torch.float32, torch.bfloat16, name=name)
    model, parallel, optimizer = made
    for number in (1, 2):
        step(made, number, 1.0)
        for shard in parallel.gradients.shards:
            assert torch.equal(shard.weight, shard.master.detach().bfloat16())
    with torch.no_grad():
        for shard in parallel.gradients.shards:
            shard.master.mul_(1.5)
    optimizer.restored(7)
    assert all(torch.equal(shard.weight, shard.master.detach().bfloat16()) for shard in parallel.gradients.shards)
    assert model.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restored_state_goes_on_with_the_same_bits(name: str) -> None:
    made, again = (of_one_process("llama", torch.float32, torch.bfloat16, name=name) for _ in range(2))
    for number in (1, 2, 3):
        step(made, number, 1.0)
    with torch.no_grad():
        for shard, stored in zip(again[1].gradients.shards, made[1].gradients.shards, strict=True):
            shard.master.copy_(stored.master)
        for kind, tensors in again[2].state().items():
            for tensor, stored in zip(tensors, made[2].state()[kind], strict=True):
                tensor.copy_(stored)
    again[2].restored(3)
    for one in (made, again):
        step(one, 4, 1.0)
    assert same(everything(again), everything(made))


def test_adamw_changes_many_parts_at_once_as_it_would_one_after_another() -> None:
    made = of_one_process("qwen3-biases-tied", torch.float32, torch.bfloat16)
    shards = made[1].gradients.shards
    apart = [copy_of(shard) for shard in shards]
    other = make_optimizer(apart, OptimizerConfig(learning_rate=RATE), Layout().mesh(ALONE), made[1].sharding)
    for number in range(1, 4):
        drawn = draw_gradients(made[0], number)
        for shard in apart:
            shard.master.grad = drawn[shard.name].bfloat16().float().flatten()
        other.begin(RATE / number)
        other.update(torch.tensor(0.5))
        step(made, number, 0.5)
    assert isinstance(made[2], AdamW)
    assert isinstance(other, AdamW)
    assert len(made[2]._groups) < 10 < len(shards) == len(other._groups)
    for one, two in zip(shards, apart, strict=True):
        torch.testing.assert_close(one.master, two.master, rtol=1e-6, atol=1e-7)


def host_memory(device: torch.device, dtype: torch.dtype) -> HostMemory:
    """Blocks that end within shards; a CPU takes the way of a GPU without its streams."""
    return HostMemory(device, dtype, block=37)


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_in_the_host_changes_alike(
    monkeypatch: pytest.MonkeyPatch, name: str, compute_dtype: torch.dtype | None
) -> None:
    """To rounding: on a CPU the last elements of a block fill no vector, and round otherwise."""
    plain = of_one_process("mixtral", torch.float32, compute_dtype, name=name)
    monkeypatch.setattr(make, "_memory", lambda config, device, dtype: host_memory(device, dtype))
    shards = [copy_of(shard) for shard in plain[1].gradients.shards]
    mesh = Layout().mesh(ALONE)
    settings = OptimizerConfig(learning_rate=RATE, name=name, offload=True)
    moved = make_optimizer(shards, settings, mesh, plain[1].sharding)
    for number in (1, 2, 3):
        drawn = draw_gradients(plain[0], number)
        for shard in shards:
            shard.master.grad = drawn[shard.name].to(compute_dtype or torch.float32).float().view(shard.master.shape)
        moved.begin(RATE / number)
        moved.update(torch.tensor(0.5))
        step(plain, number, 0.5)
    state, wanted = moved.state(), plain[2].state()
    assert state.keys() == {"master", *wanted}
    wanted["master"] = [shard.master.detach() for shard in plain[1].gradients.shards]
    for kind, tensors in state.items():
        for found, other in zip(tensors, wanted[kind], strict=True):
            torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)
    for shard, master in zip(shards, state["master"], strict=True):
        assert torch.equal(shard.weight, master.to(shard.weight.dtype))
        is_freed = shard.master.untyped_storage().nbytes() == 0
        assert is_freed == (compute_dtype is not None)


def copy_of(shard: ParameterShard) -> ParameterShard:
    weight = shard.weight.detach().clone()
    is_weight = shard.weight.data_ptr() == shard.master.data_ptr()
    return ParameterShard(
        shard.name,
        shard.shape,
        shard.start,
        weight,
        nn.Parameter(weight if is_weight else shard.master.detach().clone()),
    )


def test_a_cpu_keeps_its_state_where_it_is() -> None:
    made = of_one_process(offload=True)
    assert "master" not in made[2].state()


def test_orthogonalized_singular_values_are_those_of_the_polynomial() -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 9), (2, 9, 5), (1, 6, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        u, sizes, v = torch.linalg.svd(x, full_matrices=False)
        sizes = sizes / sizes.square().sum(-1, keepdim=True).sqrt()
        for _ in range(5):
            sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
        torch.testing.assert_close(orthogonalize(x), u @ torch.diag_embed(sizes) @ v, rtol=1e-5, atol=1e-6)
    assert not orthogonalize(torch.zeros(1, 3, 4)).any()


def test_tensors_are_joined_where_they_lie_side_by_side() -> None:
    flat = torch.arange(10.0)
    whole = joined([flat[2:5], flat[5:6], flat[6:9]])
    assert whole is not None
    assert whole.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert joined([flat[2:5], flat[6:7]]) is None
    assert joined([flat[:5], torch.arange(5.0)]) is None


def test_a_gradient_that_is_missing_is_told() -> None:
    made = of_one_process()
    with pytest.raises(RuntimeError, match=r"the gradient of model\..* is missing; reduce the gradients"):
        made[2].update(ONE)


@pytest.mark.parametrize("operation", [muon_momentum, muon_update])
def test_cost_of_the_ends_of_muon_is_the_hand_count(operation: Callable[..., Any]) -> None:
    narrow, wide = torch.empty(100, dtype=torch.bfloat16, device="meta"), torch.empty(100, device="meta")
    if operation is muon_momentum:
        cost = muon_momentum.cost(narrow, wide, wide, torch.empty(2), 0.95, workload=None)
        assert (cost.read, cost.written) == (800, 600)
    else:
        cost = muon_update.cost(narrow, wide, narrow, torch.empty(2), 1.0, 0.1, workload=None)
        assert (cost.read, cost.written) == (600, 600)


@pytest.mark.parametrize("factor", [0.7, 1.0])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_adamw_on_a_cpu_is_the_formula_to_rounding(factor: float, gradient_dtype: torch.dtype) -> None:
    """More elements than a block has, and an end that no vector fills."""
    count = 150_003
    state = [torch.randn(count), torch.randn(count), torch.rand(count)]
    weight, gradient = state[0].bfloat16(), torch.randn(count).to(gradient_dtype)
    given, step = gradient.clone(), torch.tensor([0.01, 0.5, 0.3, factor])
    exact = [one.double() for one in state]
    adamw.reference(exact[0].clone(), *exact, gradient.double(), step.double(), Constants(0.9, 0.95, 1e-8, 0.1))
    rest = (gradient, step, Constants(0.9, 0.95, 1e-8, 0.1))
    assert adamw.bind("cpu").choose(weight, *state, *rest).name == "torch fused"
    adamw(weight, *state, *rest)
    for found, wanted in zip(state, exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(weight, state[0].bfloat16())
    assert torch.equal(gradient, given)
