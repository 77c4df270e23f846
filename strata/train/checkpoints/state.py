"""What a rank holds of a run's state: shards of masters and of the optimizer's moments, placed in the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.models.experts import CORRECTION
from strata.parallel.data_parallel import GradientAxes, ParameterShard
from strata.parallel.tensor import TensorSharding
from strata.train.checkpoints.flat_ranges import Box, FlatRange, copy_common

MASTER, SELECTION_BIAS = "master", "selection_bias"


@dataclass(frozen=True)
class StateShard:
    """A shard of one tensor of a run's state, as one rank holds it.

    kind: "master", "exp_avg" and the like. name: of the parameter, as the model calls it. shape: of the whole
    parameter. box: the shard along "tp" and "ep" that this rank has. start: the shard's first element in the flattened
    box (ZeRO and FSDP divide flat). tensor: [elements], contiguous, of any floats, on any device; read when it is
    saved, filled in place when it is loaded. is_counted: False where another rank writes the same.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    tensor: Tensor
    is_written: bool = True

    @property
    def flat_range(self) -> FlatRange:
        return FlatRange(self.box, self.start, self.tensor.numel())


def state_shards(
    shards: Sequence[ParameterShard],
    state: Mapping[str, Sequence[Tensor]],
    sharding: TensorSharding,
    axes: Mapping[str, GradientAxes],
) -> list[StateShard]:
    """This rank's state: of every parameter shard the master, and what the optimizer keeps beside it.

    shards: of `Gradients`. state: by kind one flat tensor for each shard, empty where a shard has none of that kind;
    "master" stands for the shards' own masters, where these live elsewhere. axes: of `gradient_axes`.

    Raises ValueError if a state does not fit its shard.
    """
    kinds = {MASTER: [shard.master for shard in shards], **state}
    writes = _writes(sharding, axes)
    found = []
    for kind, tensors in kinds.items():
        for shard, tensor in zip(shards, tensors, strict=True):
            flat = tensor.detach().view(-1)
            if flat.numel() not in (0, shard.master.numel()):
                raise ValueError(
                    f"{kind} of {shard.name} has {flat.numel()} elements, its shard {shard.master.numel()}"
                )
            if flat.numel():
                place = sharding.shapes[shard.name], sharding.box(shard.name), shard.start
                found.append(StateShard(kind, shard.name, *place, flat, writes[shard.name]))
    return found


def whole_shard(kind: str, name: str, tensor: Tensor, is_written: bool) -> StateShard:
    """Of a vector that every rank has whole. is_written: by this one."""
    shape = tuple(tensor.shape)
    return StateShard(kind, name, shape, tuple((0, size) for size in shape), 0, tensor, is_written)


def bias_shards(biases: Mapping[str, Tensor], is_written: bool) -> list[StateShard]:
    """biases: of routers, by the routers' names."""
    return [whole_shard(SELECTION_BIAS, name, bias, is_written) for name, bias in biases.items()]


def state_of(name: str) -> tuple[str, str]:
    """Kind and name in a run's state of what a model calls `name`: biases that no optimizer moves have their own."""
    router, _, last = name.rpartition(".")
    return (SELECTION_BIAS, router) if last == CORRECTION else (MASTER, name)


@torch.no_grad()
def fill(shards: Sequence[StateShard], values: Iterable[tuple[str, Tensor]]) -> None:
    """Put whole parameters, one after another, into the shards of masters and of biases.

    values: name and value, of any dtype and device, for every parameter; of those that are none of the shards' nothing
    is taken. Raises ValueError if a master's is missing or one has another shape.
    """
    waiting = {(shard.kind, shard.name): shard for shard in shards}
    for name, value in values:
        shard = waiting.pop(state_of(name), None)
        if shard is None:  # another rank keeps it
            continue
        if tuple(value.shape) != shard.shape:
            raise ValueError(f"parameter {name} has the shape {list(value.shape)}, which does not fit this model")
        copy_common(FlatRange.of_whole(value.shape), value.flatten(), shard.flat_range, shard.tensor)
    if missing := [name for kind, name in waiting if kind == MASTER]:
        raise ValueError(f"parameter {missing[0]} is missing; the values are of another model")


def _writes(sharding: TensorSharding, axes: Mapping[str, GradientAxes]) -> dict[str, bool]:
    """By parameter, whether this rank writes its shard. Of the ranks that hold the same, the one that has least to
    write so far does; all of them find the same.
    """
    found: dict[str, bool] = {}
    loads: dict[tuple[Axis, ...], list[int]] = {}
    for name, gradient_axes in axes.items():
        load = loads.setdefault(
            gradient_axes.replicated, [0] * math.prod(axis.size for axis in gradient_axes.replicated)
        )
        chosen = load.index(min(load))
        load[chosen] += math.prod(sharding.shapes[name])
        own = 0
        for axis in gradient_axes.replicated:
            own = own * axis.size + axis.index
        found[name] = own == chosen
    return found
