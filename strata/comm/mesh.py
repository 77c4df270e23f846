"""The ranks of a run laid out along named axes. A mesh is an argument everywhere and never global."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from strata.comm.launch import World
from strata.comm.observer import Observer

# From the outermost, whose neighbours are far apart and speak little, to the innermost.
AXES = ("pp", "dp", "shard", "cp", "tp")
# The ranks of ("shard", "cp") once more, by experts: those with equal experts, and those that share all experts out.
EXPERT_AXES = ("ep_shard", "ep")


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one along one direction of the mesh, this one included.

    index: the place of this rank in `ranks`, which holds ranks of the world. group: None if and only if size is 1; the
    collectives are the identity then, so code for one process needs no branches. observer: told of each collective.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None = field(repr=False, compare=False)
    observer: Observer | None = field(default=None, repr=False, compare=False)


class Mesh:
    """Ranks along the axes "pp" (pipeline stages), "dp" (replicas), "shard" (the ranks of a replica that divide its
    weights or optimizer state among them), "cp" (context) and "tp" (tensor).

    Two more axes see the ranks of ("shard", "cp") another way: "ep", which shares the experts out, is the inner part of
    them, and the ranks along "ep_shard" hold the same experts.
    """

    def __init__(self, world: World, sizes: dict[str, int]) -> None:
        self.world = world
        self.sizes = sizes
        self._ranks = torch.arange(world.size).view([sizes[name] for name in AXES])
        self._groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}

    @staticmethod
    def of(world: World, sizes: Mapping[str, int]) -> Mesh:
        """The mesh with these sizes; an axis that is not named has size 1. Every rank calls this with the same sizes.

        Raises ValueError if an axis is unknown or the sizes do not fill the world.
        """
        if unknown := sorted(sizes.keys() - {*AXES, "ep"}):
            raise ValueError(f"axis {unknown[0]!r} is unknown; known are {', '.join((*AXES, 'ep'))}")
        if wrong := [name for name in sizes if sizes[name] < 1]:
            raise ValueError(f"{wrong[0]} = {sizes[wrong[0]]} must be at least 1")
        full = {name: sizes.get(name, 1) for name in (*AXES, "ep")}
        ranks = math.prod(full[name] for name in AXES)
        if ranks != world.size:
            shown = " * ".join(f"{name} {full[name]}" for name in AXES)
            raise ValueError(f"{shown} = {ranks} ranks, but {world.size} run; change an axis or the number of ranks")
        if full["shard"] * full["cp"] % full["ep"]:
            held = full["shard"] * full["cp"]
            raise ValueError(f"ep = {full['ep']} does not divide shard * cp = {held}; choose ep among its divisors")
        return Mesh(world, full)

    def axis(self, name: str) -> Axis:
        """The axis of that name through this rank. The first call for an axis is collective, as in `flattened`."""
        if name in EXPERT_AXES:
            return self._expert_axis(name)
        if name not in AXES:
            raise ValueError(f"axis {name!r} is unknown; known are {', '.join((*AXES, *EXPERT_AXES))}")
        return self.flattened(name)

    def flattened(self, *names: str) -> Axis:
        """Several axes as one, the last named varying fastest; their order is that of `AXES`.

        The first call for given axes makes a process group, so every rank of the world must make it, in the same order
        as its other first calls.
        """
        at = [AXES.index(name) for name in names]
        if at != sorted(set(at)):
            raise ValueError(f"axes {', '.join(names)} must be named once each and in the order of {', '.join(AXES)}")
        others = [index for index in range(len(AXES)) if index not in at]
        size = math.prod(self.sizes[name] for name in names)
        return self._axis("*".join(names), self._ranks.permute(others + at).reshape(-1, size))

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """One or two axes, outer first, for FSDP2, which divides tensors over the last and repeats them over the first.

        A collective call, as the first one of `flattened` is.
        """
        alone = tuple((rank,) for rank in range(self.world.size))
        groups = [self._group(alone) if axis.group is None else axis.group for axis in axes]
        kind = self.world.device.type
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], kind)
        outer, inner = axes
        ranks = [[peer + rank - self.world.rank for rank in inner.ranks] for peer in outer.ranks]
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=(outer.name, inner.name))

    def _expert_axis(self, name: str) -> Axis:
        """With shard, cp as one axis of s * ep + e: "ep" varies e, "ep_shard" varies s."""
        pp, dp, shard, cp, tp = (self.sizes[axis] for axis in AXES)
        ep = self.sizes["ep"]
        ranks = self._ranks.view(pp * dp, shard * cp // ep, ep, tp)
        along = 1 if name == "ep_shard" else 2
        return self._axis(name, ranks.movedim(along, -1).reshape(-1, ranks.shape[along]))

    def _axis(self, name: str, rows: torch.Tensor) -> Axis:
        """The axis whose lines through the mesh are `rows`, [lines, size]."""
        lines = tuple(map(tuple, rows.tolist()))
        own = next(line for line in lines if self.world.rank in line)
        group = self._group(lines) if len(own) > 1 else None
        return Axis(name, len(own), own.index(self.world.rank), own, group, self.world.observer)

    def _group(self, lines: tuple[tuple[int, ...], ...]) -> ProcessGroup:
        """One group for the same ranks, whatever the axis is called: a connection costs memory on the device."""
        if lines not in self._groups:
            whole = len(lines) == 1 and dist.group.WORLD is not None
            made = dist.group.WORLD if whole else dist.new_subgroups_by_enumeration([list(line) for line in lines])[0]
            assert made is not None
            self._groups[lines] = made
        return self._groups[lines]
