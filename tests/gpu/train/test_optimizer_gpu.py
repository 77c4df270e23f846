"""Optimizers on a GPU: many shards in a launch, state that streams from the host, and bfloat16 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.placement import Placement
from strata.graph.cudagraph import CudaGraphs
from strata.kernels.optimizer.muon import muon_momentum, muon_update
from strata.parallel.data_parallel import ParameterShard
from strata.parallel.tensor import TensorSharding
from strata.train.optimizer.adamw import AdamW
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import ShardedOptimizer, make_optimizer
from strata.train.optimizer.orthogonalize import orthogonalize
from strata.train.optimizer.sharded_optimizer import clip_scale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RATE = 1e-2
SHAPES = {
    "model.embed_tokens.weight": (5000, 512),
    "model.layers.0.self_attn.q_proj.weight": (512, 512),
    "model.layers.0.mlp.gate_proj.weight": (13333, 512),  # more than a block of the ring, and ends within one
    "model.layers.0.mlp.down_proj.weight": (512, 1536),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 256, 512),
    "model.layers.0.input_layernorm.weight": (512,),
}


def make(
    name: str, *, offload: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[ParameterShard], ShardedOptimizer]:
    """Shards that lie one after another, of one rank; masters apart from weights in another dtype."""
    generator = torch.Generator("cuda").manual_seed(0)
    count = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    masters = torch.randn(count, device="cuda", generator=generator)
    weights = masters if dtype == torch.float32 else masters.to(dtype)
    shards, first = [], 0
    for key, shape in SHAPES.items():
        held = slice(first, first + torch.Size(shape).numel())
        shards.append(ParameterShard(key, torch.Size(shape), 0, weights[held], nn.Parameter(masters[held])))
        first = held.stop
    return shards, make_optimizer(shards, OptimizerConfig(RATE, name=name, offload=offload), *one_rank())


def one_rank() -> tuple[Mesh, TensorSharding]:
    mesh = Mesh.of(World(0, 0, 1, torch.device("cuda", 0), None), {})
    return mesh, TensorSharding(mesh.axis("tp"), False, dict.fromkeys(SHAPES, Placement.PER_TOKEN), SHAPES)


def set_gradients(shards: list[ParameterShard], seed: int) -> None:
    """In the memory that they had before, if they had any, so that a captured update reads them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    flat = torch.randn(sum(shard.master.numel() for shard in shards), device="cuda", generator=generator)
    for shard, drawn in zip(shards, flat.split([shard.master.numel() for shard in shards]), strict=True):
        if shard.master.grad is None:
            shard.master.grad = drawn
        else:
            shard.master.grad.copy_(drawn)


def everything(shards: list[ParameterShard], optimizer: ShardedOptimizer) -> dict[str, list[Tensor]]:
    """On the host."""
    torch.cuda.synchronize()
    masters = {"master": [shard.master.detach() for shard in shards]}
    kinds = {"weight": [shard.weight for shard in shards], **masters, **optimizer.state()}
    return {kind: [one.cpu().clone() for one in tensors] for kind, tensors in kinds.items()}


def assert_same(found: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for kind, tensors in found.items():
        for key, one, other in zip(SHAPES, tensors, wanted[kind], strict=True):
            assert torch.equal(one, other), (kind, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_in_the_host_has_the_same_bits_recorded_or_not(name: str, dtype: torch.dtype) -> None:
    found = []
    for offload, captured in ((False, False), (True, False), (True, True)):
        shards, optimizer = make(name, offload=offload, dtype=dtype)
        graphs, scale = CudaGraphs(), torch.tensor(0.5, device="cuda")
        for step in range(1, 5):
            set_gradients(shards, step)
            optimizer.begin(RATE / step)
            if not captured:
                optimizer.update(scale)
            elif step == 1:
                graphs.capture_graph("update", lambda optimizer=optimizer, scale=scale: optimizer.update(scale))
            else:
                graphs.replay("update")
        if offload:
            state = optimizer.state()
            moments = [one for kind in ("exp_avg", "momentum") for one in state.get(kind, ()) if one.numel()]
            assert all(one.is_pinned() for one in moments)
            is_freed = [shard.master.untyped_storage().nbytes() == 0 for shard in shards]
            assert is_freed == [dtype != torch.float32] * len(shards)
        found.append(everything(shards, optimizer))
    for one in found[1:]:
        assert_same(one, found[0])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_scale_zero_changes_nothing(name: str, offload: bool) -> None:
    shards, optimizer = make(name, offload=offload)
    set_gradients(shards, 0)
    optimizer.begin(RATE)
    optimizer.update(torch.tensor(1.0, device="cuda"))
    before = everything(shards, optimizer)
    for shard in shards:
        shard.master.grad.fill_(float("nan"))
    optimizer.begin(RATE)
    optimizer.update(clip_scale(torch.tensor(float("nan"), device="cuda"), 1.0))
    assert_same(everything(shards, optimizer), before)


def test_restored_masters_are_rounded_into_the_weights() -> None:
    shards, optimizer = make("adamw", offload=True)
    masters = optimizer.state()["master"]
    for master in masters:
        master.mul_(1.5)
    optimizer.restored(3)
    for shard, master in zip(shards, masters, strict=True):
        assert torch.equal(shard.weight.cpu(), master.bfloat16())


def test_adamw_changes_many_parts_at_once_with_the_bits_of_one_after_another() -> None:
    """Shards that lie side by side are one launch, shards with memory of their own one each."""
    shards, optimizer = make("adamw", offload=False)
    apart = [
        ParameterShard(one.name, one.shape, 0, one.weight.clone(), nn.Parameter(one.master.detach().clone()))
        for one in shards
    ]
    other = make_optimizer(apart, OptimizerConfig(RATE), *one_rank())
    assert isinstance(optimizer, AdamW)
    assert isinstance(other, AdamW)
    assert len(optimizer._groups) == 3 < len(other._groups) == len(SHAPES)
    for step in range(1, 4):
        set_gradients(shards, step)
        for one, two in zip(shards, apart, strict=True):
            two.master.grad = one.master.grad.clone()
        for each in (optimizer, other):
            each.begin(RATE / step)
            each.update(torch.tensor(0.5, device="cuda"))
    assert_same(everything(apart, other), everything(shards, optimizer))


@pytest.mark.parametrize("count", [1, 777, 100_000])
@pytest.mark.parametrize("factor", [0.7, 0.0])
def test_ends_of_muon_are_their_references(count: int, factor: float) -> None:
    step = torch.tensor([0.01, factor], device="cuda")
    momentum, gradient, master = torch.randn(3, count, device="cuda").clone().unbind()
    direction = torch.randn(count, device="cuda").bfloat16()
    result, weight = (torch.zeros(count, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert muon_momentum.bind("cuda").choose(result, momentum, gradient, step, 0.95).name == "triton"
    assert muon_update.bind("cuda").choose(weight, master, direction, step, 3.0, 0.1).name == "triton"
    wanted = [one.clone() for one in (result, momentum, weight, master)]
    muon_momentum.reference(wanted[0], wanted[1], gradient, step, 0.95)
    muon_update.reference(wanted[2], wanted[3], direction, step, 3.0, 0.1)
    muon_momentum(result, momentum, gradient, step, 0.95)
    muon_update(weight, master, direction, step, 3.0, 0.1)
    for found, exact in zip((result, momentum, weight, master), wanted, strict=True):
        close = {"rtol": 1e-2, "atol": 1e-3} if found.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found, exact, **close)


@pytest.mark.parametrize("shape", [(1, 256, 1024), (2, 512, 256)])
def test_orthogonalized_in_bfloat16(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.float64)
    found, wanted = orthogonalize(x.bfloat16()).double(), orthogonalize(x)
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    sizes = torch.linalg.svdvals(found)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
