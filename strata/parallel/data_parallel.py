"""What every way of data parallelism shares: over which ranks gradients are summed, and what an optimizer is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import AXES, Axis, Mesh
from strata.comm.placement import Placement
from strata.parallel.tensor import TensorSharding


@dataclass(frozen=True)
class GradientAxes:
    """The axes over which a gradient is reduced, in order.

    reduce_scatter: each of its ranks keeps a shard of the sum and of the optimizer state. all_reduce: the shard is then
    summed over these. replicated: along these, ranks end up with the same shard.
    """

    reduce_scatter: Axis
    all_reduce: tuple[Axis, ...]
    replicated: tuple[Axis, ...]

    @property
    def is_counted(self) -> bool:
        """Whether this rank is the one that counts its shard in a sum over all ranks."""
        return all(axis.index == 0 for axis in self.replicated)


def gradient_axes(mesh: Mesh, sharding: TensorSharding, zero: int) -> dict[str, GradientAxes]:
    """By parameter. zero: the stage (see `Layout`); 0 divides nothing.

    Every rank along ("dp", "shard", "cp") sees other tokens. Experts that are divided are held alike by the ranks
    along "ep_shard", and get the tokens of all ranks along "ep" by themselves.
    """
    alone = mesh.flattened()
    dense: tuple[Axis, tuple[Axis, ...]]
    expert: tuple[Axis, tuple[Axis, ...]]
    if zero:
        dense = mesh.flattened("shard", "cp"), (mesh.axis("dp"),)
        expert = mesh.axis("ep_shard"), (mesh.axis("dp"),)
    else:
        dense = alone, (mesh.flattened("dp", "shard", "cp"),)
        expert = alone, (mesh.axis("dp"), mesh.axis("ep_shard"))
    found = {}
    for name, placement in sharding.placements.items():
        is_divided = placement is Placement.EXPERT and sharding.experts is not None
        divided, data = expert if is_divided else dense
        repeated = (*data, sharding.axis) if sharding.is_replicated(name) else data
        added = (*data, sharding.axis) if placement.gradient_is_partial(sharding.sequence_parallel) else data
        found[name] = GradientAxes(divided, _several(added), _several(repeated))
    return found


def _several(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(axis for axis in axes if axis.size > 1)


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard of one parameter, for the optimizer to change.

    name: of the parameter. shape: of the whole parameter on this rank of the tensor axis; decay and the like are
    decided by it. start: the index of the shard's first element in the flattened parameter. weight: the shard, a view
    of what the model computes with. master: the same in the precision that updates add up in, which is `weight` itself
    where the model has that precision; its `.grad` is set by `Gradients.reduce`.
    """

    name: str
    shape: torch.Size
    start: int
    weight: Tensor
    master: nn.Parameter


class Gradients(Protocol):
    """The gradients of a step, and the weights that it changes, however they are divided among ranks.

    A step: for each micro-batch a backward pass and `accumulate`, with `set_is_last_backward` before the last pass;
    `reduce` and `norm`; the optimizer, which clips, changes the masters of `shards`; `sync_weights`, or
    `all_gather_weights` after one that has rounded the masters into the weights of `shards` itself. All ranks call
    these alike. The loss whose gradients are added up is each rank's share of the loss of the whole step: nothing is
    averaged.

    shards: of what is trained. frozen: of the parameters without gradients, to be filled and then left.
    """

    shards: Sequence[ParameterShard]
    frozen: Sequence[ParameterShard]

    def set_is_last_backward(self) -> None:
        """The next backward pass is the last of the step: its gradients may be reduced while it still runs."""

    def accumulate(self) -> None:
        """Take the gradients that a backward pass left. Call it after every one."""

    def reduce(self) -> None:
        """Sum over all ranks; then every master has its shard of the step's gradient."""

    def norm(self) -> Tensor:
        """The Euclidean norm of the whole gradient, [] on the device, alike on all ranks; does not wait for it."""

    def sync_weights(self) -> None:
        """Round the masters into the weights, all-gather these, and free the gradients."""

    def all_gather_weights(self) -> None:
        """All-gather the shards' weights, and free the gradients."""


def frozen_shards(model: nn.Module) -> list[ParameterShard]:
    """Of the parameters of `model` that have no gradient, whole as this rank has them."""
    return [
        ParameterShard(name, parameter.shape, 0, parameter.data, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]


def all_ranks(mesh: Mesh) -> Axis:
    """All ranks of the mesh as one axis."""
    return mesh.flattened(*AXES)


def global_norm(gradients: Sequence[Tensor], zero: Tensor, world_axis: Axis) -> Tensor:
    """The norm of the whole gradient, [].

    gradients: the shards of it that this rank counts (`GradientAxes.is_counted`). zero: 0, [], of the result's dtype
    and device. world_axis: see `all_ranks`.
    """
    squares = [norm.to(zero.dtype).square() for norm in torch._foreach_norm(list(gradients))] if gradients else []
    return start_all_reduce(torch.stack([zero, *squares]).sum(), world_axis).wait().sqrt()
