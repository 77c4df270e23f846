"""What a rank holds of a run's state: pieces of masters and of the optimizer's moments, placed in the whole tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strata.comm.mesh import Axis
from strata.parallel.data_parallel import GradientAxes, Part
from strata.parallel.tensor import TensorSharding
from strata.train.checkpoints.regions import Box, Run

MASTER = "master"


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a run's state, as one rank holds it.

    kind: "master", "exp_avg" and the like. name: of the parameter, as the model calls it. shape: of the whole
    parameter. box: the shard along "tp" and "ep" that this rank has. start: the piece's first element in the flattened
    box (ZeRO and FSDP divide flat). tensor: [elements], contiguous, float32 or wider, on any device; read when it is
    saved, filled in place when it is loaded. is_counted: False where another rank writes the same.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    tensor: Tensor
    is_counted: bool = True

    @property
    def run(self) -> Run:
        return Run(self.box, self.start, self.tensor.numel())


def pieces_of(
    parts: Sequence[Part],
    state: Mapping[str, Sequence[Tensor]],
    sharding: TensorSharding,
    axes: Mapping[str, GradientAxes],
) -> list[Piece]:
    """This rank's pieces: of every part the master, and what the optimizer keeps beside it.

    parts: of `Gradients`. state: by kind one flat tensor for each part, empty where a part has none of that kind;
    "master" stands for the parts' own masters, where these live elsewhere. axes: of `gradient_axes`.

    Raises ValueError if a state does not fit its part.
    """
    kinds = {MASTER: [part.master for part in parts], **state}
    writes = _writes(sharding, axes)
    found = []
    for kind, tensors in kinds.items():
        for part, tensor in zip(parts, tensors, strict=True):
            flat = tensor.detach().view(-1)
            if flat.numel() not in (0, part.master.numel()):
                raise ValueError(f"{kind} of {part.name} has {flat.numel()} elements, its part {part.master.numel()}")
            if flat.numel():
                place = sharding.shapes[part.name], sharding.box(part.name), part.start
                found.append(Piece(kind, part.name, *place, flat, writes[part.name]))
    return found


def _writes(sharding: TensorSharding, axes: Mapping[str, GradientAxes]) -> dict[str, bool]:
    """By parameter, whether this rank writes its part. Of the ranks that hold the same, the one that has least to write
    so far does; all of them find the same.
    """
    found: dict[str, bool] = {}
    loads: dict[tuple[Axis, ...], list[int]] = {}
    for name, way in axes.items():
        load = loads.setdefault(way.repeated, [0] * math.prod(axis.size for axis in way.repeated))
        chosen = load.index(min(load))
        load[chosen] += math.prod(sharding.shapes[name])
        own = 0
        for axis in way.repeated:
            own = own * axis.size + axis.index
        found[name] = own == chosen
    return found
