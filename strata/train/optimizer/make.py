"""From an optimizer's config and this rank's shards to the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec
import torch

from strata.comm.collectives import all_gather_json
from strata.comm.mesh import Mesh
from strata.comm.placement import Placement
from strata.parallel.data_parallel import ParameterShard
from strata.parallel.tensor import TensorSharding
from strata.train.optimizer.adamw import AdamW
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.memory import HostMemory, StateMemory
from strata.train.optimizer.muon import Muon
from strata.train.optimizer.muon_rounds import Holding, is_layer_matrix, make_rounds

ShardedOptimizer = AdamW | Muon


def make_optimizer(
    shards: Sequence[ParameterShard], config: OptimizerConfig, mesh: Mesh, sharding: TensorSharding
) -> ShardedOptimizer:
    """The optimizer of this rank. A collective call: every rank of the mesh makes it.

    shards: `Gradients.shards`, when their masters have values, because these may move to the host here. sharding: how
    the model was divided along "tp" and "ep". Raises ValueError if Muon finds a matrix that the ranks do not hold once.
    """
    device = mesh.world.device
    dtype = shards[0].master.dtype if shards else torch.float32
    if config.name == "adamw":
        memory = _memory(config, device, dtype)
        return AdamW(shards, memory.masters(shards), config, memory, device, dtype)
    axis = mesh.flattened("dp", "shard", "cp", "tp")
    own = {"dtype": str(dtype) if shards else None, "holdings": [asdict(one) for one in _holdings(shards, sharding)]}
    found = all_gather_json(own, axis, device)
    # A rank without shards has to send and receive what the others do.
    dtype = next((_dtype(one["dtype"]) for one in found if one["dtype"]), dtype)
    rounds = make_rounds([msgspec.convert(one["holdings"], list[Holding]) for one in found])
    memory = _memory(config, device, dtype)
    return Muon(shards, memory.masters(shards), config, memory, rounds, axis, device, dtype)


def _memory(config: OptimizerConfig, device: torch.device, dtype: torch.dtype) -> StateMemory:
    is_moved = config.offload and device.type != "cpu"
    return HostMemory(device, dtype) if is_moved else StateMemory(device)


def _holdings(shards: Sequence[ParameterShard], sharding: TensorSharding) -> Iterator[Holding]:
    for shard in shards:
        if is_layer_matrix(shard.name, shard.shape):
            placement = sharding.placements[shard.name]
            cut = placement.divided_dim
            experts = sharding.experts if placement is Placement.EXPERT else None
            yield Holding(
                shard.name,
                0 if experts is None else experts.index,
                0 if cut is None else sharding.axis.index,
                cut,
                tuple(shard.shape),
                shard.start,
                shard.start + shard.master.numel(),
            )


def _dtype(name: str) -> torch.dtype:
    """Of "torch.float32"."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
