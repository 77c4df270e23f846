"""Collectives and their gradients on 4 gloo ranks, in float64, against functions of all inputs in one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strata.comm import collectives as c
from strata.comm.collectives import all_gather_json
from strata.comm.launch import World
from strata.comm.mesh import AXES, Mesh
from tests.parallel.ranks import run_each, run_ranks

SENT = [[1, 0, 2, 3], [2, 2, 0, 1], [0, 1, 1, 4], [3, 1, 0, 2]]  # rows from rank i to rank j


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs() -> list[Tensor]:
    """One tensor a rank."""
    return [seeded(i, 8, 12) for i in range(4)]


def uneven() -> list[Tensor]:
    """One tensor a rank, with the rows that `SENT` sends."""
    return [seeded(10 + i, sum(row), 3) for i, row in enumerate(SENT)]


def together(name: str, x: list[Tensor]) -> list[Tensor]:
    """What each rank should get, computed from all inputs at once: plain functions that autograd differentiates."""
    total = torch.stack(x).sum(0) if name != "all_to_all_uneven" else None
    match name:
        case "all_reduce":
            return [total] * 4
        case "copy_to":
            return x
        case "all_gather_0" | "all_gather_1":
            return [torch.cat(x, int(name[-1]))] * 4
        case "reduce_scatter_0" | "reduce_scatter_1":
            return list(total.chunk(4, int(name[-1])))
        case "all_to_all":
            return [torch.cat([one.chunk(4)[i] for one in x]) for i in range(4)]
        case "all_to_all_uneven":
            return [torch.cat([one.split(row)[i] for one, row in zip(x, SENT, strict=True)]) for i in range(4)]
        case "shift_1":
            return [x[i - 1] for i in range(4)]
        case _:
            return [x[(i + 2) % 4] for i in range(4)]


NAMES = ("all_reduce", "copy_to", "all_gather_0", "all_gather_1", "reduce_scatter_0", "reduce_scatter_1", "all_to_all",
         "all_to_all_uneven", "shift_1", "shift_-2")  # fmt: skip


def apart(name: str, x: Tensor, axis: Any) -> Tensor:
    function, _, argument = name.rpartition("_") if name[-1].isdigit() else (name, "", "")
    if name == "all_to_all_uneven":
        return c.all_to_all(x, axis, SENT[axis.index], [row[axis.index] for row in SENT])
    return getattr(c, function)(x, axis, *([int(argument)] if argument else []))


def collectives(world: World, folder: Path) -> dict[str, Any]:
    """Largest differences of values and gradients on this rank; gradients of a loss that weighs each rank's output."""
    axis = Mesh.of(world, {"tp": 4}).axis("tp")
    found: dict[str, Any] = {}
    for name in NAMES:
        x = [one.requires_grad_() for one in (uneven() if "uneven" in name else inputs())]
        wanted = together(name, x)
        # An all-reduce hands the same gradient to all ranks, which use the result alike: one loss, counted once.
        shared = name == "all_reduce"
        weights = [seeded(50 if shared else 50 + i, *w.shape) for i, w in enumerate(wanted)]
        terms = [(w * weight).sum() for w, weight in zip(wanted, weights, strict=True)]
        (terms[0] if shared else sum(terms)).backward()
        own = (uneven() if "uneven" in name else inputs())[world.rank].requires_grad_()
        result = apart(name, own, axis)
        assert result.is_contiguous() or not name.startswith("all_gather")
        (result * weights[world.rank]).sum().backward()
        # What `copy_to` hands on is summed: the one tensor that all hold alike is used by all.
        gradient = sum(one.grad for one in x) if name == "copy_to" else x[world.rank].grad
        found[name] = [float((result - wanted[world.rank]).abs().max()), float((own.grad - gradient).abs().max())]
    return found


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each([asked_in_any_order, collectives, plain, axes], 4, tmp_path_factory.mktemp("four"))


def test_values_and_gradients_equal_one_process(of_four: dict[str, list[Any]]) -> None:
    for rank in of_four["collectives"]:
        for name in NAMES:
            value, gradient = rank[name]
            assert value < 1e-12, name
            assert gradient < 1e-12, name


def plain(world: World, folder: Path) -> dict[str, Any]:
    axis = Mesh.of(world, {"tp": 4}).axis("tp")
    x = inputs()
    whole = torch.empty(32, 12, dtype=torch.float64)
    part = whole[8 * world.rank : 8 * world.rank + 8].copy_(x[world.rank])
    pending = c.start_all_gather(part, axis, whole)  # in place
    most = c.start_all_reduce(x[world.rank].clone(), axis, "max")
    summed = c.start_reduce_scatter(x[world.rank], axis)
    return {
        "gather": torch.equal(pending.wait(), torch.cat(x)),
        "max": torch.equal(most.wait(), torch.stack(x).amax(0)),
        "reduce_scatter": torch.allclose(summed.wait(), torch.stack(x).sum(0).chunk(4)[world.rank], atol=1e-12),
        "json": all_gather_json({"rank": world.rank, "text": "é" * world.rank}, axis, world.device),
    }


def one_process_is_the_identity() -> None:
    axis = Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("tp")
    x = inputs()[0]
    for name in NAMES:
        if name != "all_to_all_uneven":
            assert apart(name, x, axis) is x, name


def test_plain_collectives_and_json(of_four: dict[str, list[Any]]) -> None:
    one_process_is_the_identity()
    for rank in of_four["plain"]:
        assert rank["gather"]
        assert rank["max"]
        assert rank["reduce_scatter"]
        assert rank["json"] == [{"rank": i, "text": "é" * i} for i in range(4)]


def axes(world: World, folder: Path) -> dict[str, Any]:
    """The ranks of every axis of some meshes, and that their groups connect those ranks."""
    found = {}
    for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "shard": 2, "ep": 2}, {"shard": 2, "cp": 2, "ep": 2}, {"tp": 4}):
        mesh = Mesh.of(world, sizes)
        names = [*[(name,) for name in AXES], ("dp", "shard", "cp"), ("shard", "cp"), ("dp", "tp")]
        ranks = {"*".join(name): mesh.flattened(*name) for name in names}
        ranks |= {name: mesh.axis(name) for name in ("ep", "ep_shard")}
        for axis in ranks.values():
            seen = c.start_all_gather(torch.tensor([world.rank]), axis).wait().tolist()
            assert tuple(seen) == axis.ranks
            assert axis.ranks[axis.index] == world.rank
        found[str(sizes)] = {name: axis.ranks for name, axis in ranks.items()}
    two = Mesh.of(world, {"dp": 2, "shard": 2})
    found["device mesh"] = two.device_mesh(two.axis("dp"), two.axis("shard")).mesh.tolist()
    return found


def test_axes_are_the_ranks_that_row_major_order_gives(of_four: dict[str, list[Any]]) -> None:
    for rank, found in enumerate(of_four["axes"]):
        first = found["{'dp': 2, 'tp': 2}"]
        assert first["tp"] == [[0, 1], [2, 3]][rank // 2]
        assert first["dp"] == first["dp*shard*cp"] == [[0, 2], [1, 3]][rank % 2]
        assert first["dp*tp"] == [0, 1, 2, 3]
        assert first["pp"] == first["shard"] == [rank]
        second = found["{'pp': 2, 'shard': 2, 'ep': 2}"]
        assert second["ep"] == second["shard"] == [[0, 1], [2, 3]][rank // 2]
        assert second["ep_shard"] == [rank]
        third = found["{'shard': 2, 'cp': 2, 'ep': 2}"]
        assert third["ep"] == third["cp"] == [[0, 1], [2, 3]][rank // 2]
        assert third["ep_shard"] == third["shard"] == [[0, 2], [1, 3]][rank % 2]
        assert found["device mesh"] == [[0, 1], [2, 3]]


def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 .*5 rows do not divide into 2 parts along axis tp; pad them"):
        run_ranks(fails_on_one, 2, tmp_path)


def fails_on_one(world: World, folder: Path) -> None:
    axis = Mesh.of(world, {"tp": 2}).axis("tp")
    if world.rank == 1:
        c.start_reduce_scatter(torch.zeros(5), axis)
    c.start_all_gather(torch.zeros(1), axis).wait()


def test_meshes_are_not_shared() -> None:
    """Two meshes of one process know nothing of each other."""
    world = World(0, 0, 1, torch.device("cpu"), None)
    first, second = Mesh.of(world, {}), Mesh.of(world, {"tp": 1})
    for name in itertools.chain(AXES, ("ep", "ep_shard")):
        assert first.axis(name) == second.axis(name)
        assert first.axis(name) is not second.axis(name)


def asked_in_any_order(world: World, folder: Path) -> list[list[int]]:
    """The ranks along axes that each rank asks for in another order, and one rank not at all."""
    mesh = Mesh.of(world, {"pp": 2, "shard": 2, "ep": 2}, fsdp=True)
    names = ["pp", "ep"] if world.rank % 2 else ["ep", "pp"]
    found = {name: mesh.axis(name) for name in names}
    if world.rank < 2:
        mesh.device_mesh(mesh.axis("ep_shard"))  # a group of one rank
    second = Mesh.of(world, {"dp": 2, "tp": 2}).axis("tp")
    axes = [found["pp"], found["ep"], second]
    return [c.start_all_gather(torch.tensor([world.rank]), axis).wait().tolist() for axis in axes]


def test_groups_do_not_depend_on_who_asks_for_an_axis_when(of_four: dict[str, list[Any]]) -> None:
    """Stages of a pipeline differ in what they need; then comes a second mesh."""
    for rank, found in enumerate(of_four["asked_in_any_order"]):
        pair = [[0, 1], [2, 3]][rank // 2]
        assert found == [[[0, 2], [1, 3]][rank % 2], pair, pair]


def timeouts(world: World, folder: Path) -> list[float]:
    """Of the groups along the axes of a mesh, seconds: of a part of the world, and of all."""
    mesh = Mesh.of(world, {"pp": 2, "shard": 2, "ep": 2}, fsdp=True)
    groups = [mesh.axis("pp").group, mesh.axis("ep").group, mesh.flattened(*AXES).group]
    groups.append(mesh.device_mesh(mesh.axis("ep_shard")).get_group())
    device = torch.device("cpu")
    return [group._get_backend(device).options._timeout.total_seconds() for group in groups]


def test_every_group_waits_as_long_as_the_world(tmp_path: Path) -> None:
    for found in run_ranks(timeouts, 4, tmp_path, collective_seconds=77.0):
        assert found == [77.0] * 4


def test_axes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda *_, **__: (object(), []))
    mesh = Mesh.of(World(0, 0, 8, torch.device("cpu"), "gloo"), {"pp": 2, "dp": 2, "tp": 2})
    with pytest.raises(ValueError, match="no group along pp, dp; it has: pp; dp; "):
        mesh.flattened("pp", "dp")
