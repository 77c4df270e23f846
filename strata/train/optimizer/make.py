"""From an optimizer's config and this rank's parts to the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import msgspec
import torch

from strata.comm.exchange import all_gather_json
from strata.comm.mesh import Mesh
from strata.parallel.data_parallel import Part
from strata.parallel.families import Placement
from strata.parallel.tensor import TensorSharding
from strata.train.optimizer.adamw import AdamW
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.memory import DeviceMemory, HostMemory, StateMemory
from strata.train.optimizer.muon import Muon
from strata.train.optimizer.muon_plan import Holding, is_layer_matrix, plan_rounds
from strata.train.optimizer.part_optimizer import PartOptimizer


def make_optimizer(
    parts: Sequence[Part], config: OptimizerConfig, mesh: Mesh, sharding: TensorSharding
) -> PartOptimizer:
    """The optimizer of this rank. A collective call: every rank of the mesh makes it.

    parts: `Gradients.parts`, when their masters have values, because these may move to the host here. sharding: how the
    model was divided along "tp" and "ep". Raises ValueError if Muon finds a matrix that the ranks do not hold once.
    """
    device = mesh.world.device
    dtype = parts[0].master.dtype if parts else torch.float32
    if config.name == "adamw":
        memory = _memory(config, device, dtype)
        return AdamW(parts, memory.masters(parts), config, memory, device, dtype)
    axis = mesh.flattened("dp", "shard", "cp", "tp")
    own = {"dtype": str(dtype) if parts else None, "holdings": [asdict(one) for one in _holdings(parts, sharding)]}
    found = all_gather_json(own, axis, device)
    # A rank without parts has to send and receive what the others do.
    dtype = next((_dtype(one["dtype"]) for one in found if one["dtype"]), dtype)
    rounds = plan_rounds([msgspec.convert(one["holdings"], list[Holding]) for one in found])
    memory = _memory(config, device, dtype)
    return Muon(parts, memory.masters(parts), config, memory, rounds, axis, device, dtype)


def _memory(config: OptimizerConfig, device: torch.device, dtype: torch.dtype) -> StateMemory:
    is_moved = config.offload and device.type != "cpu"
    return HostMemory(device, dtype) if is_moved else DeviceMemory(device)


def _holdings(parts: Sequence[Part], sharding: TensorSharding) -> Iterator[Holding]:
    for part in parts:
        if is_layer_matrix(part.name, part.shape):
            placement = sharding.placements[part.name]
            cut = placement.divided_dim
            experts = sharding.experts if placement is Placement.EXPERT else None
            yield Holding(
                part.name,
                0 if experts is None else experts.index,
                0 if cut is None else sharding.axis.index,
                cut,
                tuple(part.shape),
                part.start,
                part.start + part.master.numel(),
            )


def _dtype(name: str) -> torch.dtype:
    """Of "torch.float32"."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
