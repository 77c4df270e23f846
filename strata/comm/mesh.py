"""The ranks of a run laid out along named axes. A mesh is an argument everywhere and never global."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from strata.comm.launch import World
from strata.comm.observer import Observer

if TYPE_CHECKING:
    from strata.comm.peer_copies import PeerCopies
    from strata.comm.symmetric import SymmetricMemory

# From the outermost, whose neighbours are far apart and speak little, to the innermost.
AXES = ("pp", "dp", "shard", "cp", "tp")
# The ranks of ("shard", "cp") once more, by experts: those with equal experts, and those that share all experts out.
EXPERT_AXES = ("ep_shard", "ep")
# What training calls one axis. A group is no less than this: a connection costs memory on the device.
_COMBINED = (
    ("pp",),
    ("dp",),
    ("cp",),
    ("tp",),
    ("shard", "cp"),
    ("dp", "shard"),
    ("dp", "shard", "cp"),
    ("dp", "shard", "cp", "tp"),
    AXES,
)

_Lines = tuple[tuple[int, ...], ...]  # of ranks, through the mesh along an axis


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one along one direction of the mesh, this one included.

    index: the place of this rank in `ranks`, which holds ranks of the world. group: None if and only if size is 1; the
    collectives are the identity then, so code for one process needs no branches. observer: notified of each collective.
    symmetric: memory through which kernels exchange small messages (`strata.comm.symmetric`), None: there is none.
    copies: through which copy engines exchange large ones (`strata.comm.peer_copies`), None: likewise.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None = field(repr=False, compare=False)
    observer: Observer | None = field(default=None, repr=False, compare=False)
    symmetric: SymmetricMemory | None = field(default=None, repr=False, compare=False)
    copies: PeerCopies | None = field(default=None, repr=False, compare=False)


class Mesh:
    """Ranks along the axes "pp" (pipeline stages), "dp" (replicas), "shard" (the ranks of a replica that divide its
    weights or optimizer state among them), "cp" (context) and "tp" (tensor).

    Two more axes see the ranks of ("shard", "cp") another way: "ep", which shares the experts out, is the inner part of
    them, and the ranks along "ep_shard" hold the same experts.

    All ranks make a mesh together, with all its groups in one order, because making a group is collective: the world
    would hang if a rank that needs none, such as a stage without experts, left it out. What comes after is of one rank.
    """

    def __init__(self, world: World, sizes: dict[str, int], *, fsdp: bool) -> None:
        self.world = world
        self.sizes = sizes
        self._ranks = torch.arange(world.size).view([sizes[name] for name in AXES])
        lines = [self._lines(*names) for names in _COMBINED] + [self._expert_lines(name) for name in EXPERT_AXES]
        wanted = [one for one in lines if len(one[0]) > 1]
        if fsdp and self._expert_lines("ep") != self._alone and self._expert_lines("ep_shard") == self._alone:
            wanted.append(self._alone)
        self._groups = {one: self._make_group(one) for one in dict.fromkeys(wanted)}

    @staticmethod
    def of(world: World, sizes: Mapping[str, int], *, fsdp: bool = False) -> Mesh:
        """The mesh with these sizes; an axis that is not named has size 1. Every rank of the world calls this alike.

        fsdp: whether weights are divided by FSDP2, which wants a group also where one rank holds experts alone.
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
        return Mesh(world, full, fsdp=fsdp)

    def axis(self, name: str) -> Axis:
        """The axis of that name through this rank."""
        if name in EXPERT_AXES:
            return self._axis(name, self._expert_lines(name))
        if name not in AXES:
            raise ValueError(f"axis {name!r} is unknown; known are {', '.join((*AXES, *EXPERT_AXES))}")
        return self.flattened(name)

    def flattened(self, *names: str) -> Axis:
        """Several axes as one, the last named varying fastest; their order is that of `AXES`.

        Raises ValueError for axes that training never takes together, whose ranks have no group.
        """
        at = [AXES.index(name) for name in names]
        if at != sorted(set(at)):
            raise ValueError(f"axes {', '.join(names)} must be named once each and in the order of {', '.join(AXES)}")
        return self._axis("*".join(names), self._lines(*names))

    def neighbours(self, name: str, size: int, *, apart: bool = False) -> Axis:
        """An axis of that name along `size` ranks whose numbers follow one another, a part of "tp"; apart: along those
        that have one place in all such groups of "tp". All ranks of the world call this together. Raises ValueError if
        so many do not divide "tp".
        """
        if self.sizes["tp"] % size:
            raise ValueError(f"{name} = {size} does not divide tp = {self.sizes['tp']}; choose a divisor")
        groups = self._ranks.reshape(-1, self.sizes["tp"] // size, size)
        lines = _as_lines(groups.transpose(1, 2).flatten(0, 1) if apart else groups.flatten(0, 1))
        if len(lines[0]) > 1 and lines not in self._groups:
            self._groups[lines] = self._make_group(lines)
        return self._axis(name, lines)

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """One or two axes of a mesh made for FSDP, outer first; it divides tensors over the last and repeats them over
        the first.
        """
        groups = [self._groups[self._alone] if axis.group is None else axis.group for axis in axes]
        kind = self.world.device.type
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], kind)
        outer, inner = axes
        ranks = [[peer + rank - self.world.rank for rank in inner.ranks] for peer in outer.ranks]
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=(outer.name, inner.name))

    @property
    def _alone(self) -> _Lines:
        """Those of any axis of size 1."""
        return self._lines()

    def _lines(self, *names: str) -> _Lines:
        """The ranks along the named axes, for each place along the others."""
        at = [AXES.index(name) for name in names]
        others = [index for index in range(len(AXES)) if index not in at]
        size = math.prod(self.sizes[name] for name in names)
        return _as_lines(self._ranks.permute(others + at).reshape(-1, size))

    def _expert_lines(self, name: str) -> _Lines:
        """With shard, cp as one axis of s * ep + e: "ep" varies e, "ep_shard" varies s."""
        pp, dp, shard, cp, tp = (self.sizes[axis] for axis in AXES)
        ep = self.sizes["ep"]
        ranks = self._ranks.view(pp * dp, shard * cp // ep, ep, tp)
        along = 1 if name == "ep_shard" else 2
        return _as_lines(ranks.movedim(along, -1).reshape(-1, ranks.shape[along]))

    def _axis(self, name: str, lines: _Lines) -> Axis:
        own = next(line for line in lines if self.world.rank in line)
        group = self._groups.get(lines) if len(own) > 1 else None
        if len(own) > 1 and group is None:
            known = "; ".join(", ".join(names) for names in _COMBINED)
            raise ValueError(f"the mesh has no group along {', '.join(name.split('*'))}; it has: {known}")
        return Axis(name, len(own), own.index(self.world.rank), own, group, self.world.observer)

    def _make_group(self, lines: _Lines) -> ProcessGroup:
        if len(lines) == 1 and dist.group.WORLD is not None:
            return dist.group.WORLD
        # Groups do not inherit how long the world waits.
        timeout = timedelta(seconds=self.world.timeout_seconds)
        group: ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
        assert group is not None
        return group


def _as_lines(rows: torch.Tensor) -> _Lines:
    return tuple(map(tuple, rows.tolist()))
