"""Sums in two operations over gloo ranks, several under way together; what is the same on one rank."""

from __future__ import annotations

from pathlib import Path

import torch

from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import Along
from strata.comm.peer_copies import fits, with_peer_copies
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce, start_all_reduce
from strata.hardware.roofline import Workload
from strata.kernels.norm.norm import add_rms_norm
from tests.parallel.ranks import run_ranks


def on_ranks(world: World, folder: Path) -> list[list[float]]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    start, finish = start_all_reduce.bind("cpu"), finish_all_reduce.bind("cpu")
    parts = [torch.full((2, 3), 10.0**part * (world.rank + 1)) for part in range(2)]
    pending = [start(part, axis, number) for number, part in enumerate(parts)]
    assert with_peer_copies(axis, world.device, 2, 1 << 20) is axis, "there are no copy engines"
    sums = [finish(one).flatten().tolist() for one in pending]
    residual, weight = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0, 3.0])
    x = torch.full((2, 3), float(world.rank))
    for kind in ("cpu", "reference"):
        found = finish_add_rms_norm.bind(kind)(start(x.clone(), axis, 0), residual, weight, 1e-5)
        wanted = add_rms_norm.reference(torch.ones(2, 3), residual, weight, 1e-5)
        assert all(map(torch.allclose, found, wanted))
    return sums


def test_sums_under_way_together(tmp_path: Path) -> None:
    for found in run_ranks(on_ranks, 2, tmp_path):
        assert found == [[3.0] * 6, [30.0] * 6]


def test_the_message_is_counted_where_it_begins() -> None:
    x, along, workload = torch.empty(4, 8, device="meta"), Along("tp", 2), Workload((4,), (4,))
    pending = start_all_reduce.meta(x, along, 0)
    assert pending.shape == (4, 8)
    assert finish_all_reduce.meta(pending).shape == (4, 8)
    assert start_all_reduce.cost(x, along, 0, workload=workload).sent == x.nbytes
    assert finish_all_reduce.cost(pending, workload=workload).bytes == 0
    assert not fits(x, along, 0)


def test_along_one_rank_nothing_travels() -> None:
    x = torch.randn(2, 3)
    alone = Axis("tp", 1, 0, (0,), None)
    for kind in ("cpu", "reference"):
        assert finish_all_reduce.bind(kind)(start_all_reduce.bind(kind)(x, alone, 0)) is x
