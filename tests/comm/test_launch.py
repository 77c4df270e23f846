"""A world from the environment: right values, and one clear line for wrong ones."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from strata.comm import launch
from strata.comm.launch import World, join_world
from strata.comm.mesh import Mesh
from strata.train.launch import launch as start_ranks

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_one_process_without_torchrun_starts_nothing() -> None:
    with join_world("cpu") as world:
        assert world == World(0, 0, 1, torch.device("cpu"), None)
        assert world.is_main
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set, but not WORLD_SIZE"),
        ({"MASTER_PORT": None}, "but not MASTER_PORT; start the processes with torchrun"),
        ({"RANK": "one"}, "RANK = 'one' is not a whole number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK = 4 does not lie below WORLD_SIZE = 4"),
    ],
)
def test_a_broken_environment_is_refused(
    environment: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name, value in (TORCHRUN | changes).items():
        if value is not None:
            environment.setenv(name, value)
    with pytest.raises(ValueError, match=message), join_world("cpu"):
        pass


def test_an_unknown_device_is_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device 'tpu': accepted are 'auto', 'cpu' and 'cuda'"), join_world("tpu"):
        pass
    environment.setattr(torch.cuda, "is_available", lambda: True)
    environment.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in (TORCHRUN | {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "5"}).items():
        environment.setenv(name, value)
    with pytest.raises(ValueError, match="process 5 of this machine has no GPU of its own, there are 4"), join_world():
        pass


def test_recordings_are_gone_before_the_ranks_part(environment: pytest.MonkeyPatch) -> None:
    """NCCL's end waits for them."""
    happened: list[str] = []

    for name, value in TORCHRUN.items():
        environment.setenv(name, value)
    environment.setenv("WORLD_SIZE", "2")
    environment.setattr(launch, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 2)]))
    environment.setattr(dist, "init_process_group", lambda *_, **__: None)
    environment.setattr(dist, "destroy_process_group", lambda: happened.append("parted"))
    with join_world("cpu") as world:
        world.on_shutdown.append(lambda: happened.append("freed"))
    assert happened == ["freed", "parted"]
    assert not world.on_shutdown, "or it would keep what it frees"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, r"pp 1 \* dp 1 \* shard 1 \* cp 1 \* tp 3 = 3 ranks, but 1 run"),
        ({"data": 1}, "axis 'data' is unknown; known are pp, dp, shard, cp, tp, ep"),
        ({"tp": 0}, "tp = 0 must be at least 1"),
        ({"ep": 2}, r"ep = 2 does not divide shard \* cp = 1"),
    ],
)
def test_a_mesh_that_does_not_fill_the_world_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh.of(World(0, 0, 1, torch.device("cpu"), None), sizes)


LEAVES = """
import os
import torch
from strata.comm.collectives import start_all_reduce
from strata.comm.launch import World, join_world
from strata.comm.mesh import Mesh

def threads() -> int:
    return len(os.listdir("/proc/self/task"))

def use(world: World) -> None:
    axis = Mesh.of(world, {"dp": world.size}).axis("dp")
    start_all_reduce(torch.ones(1), axis).wait()
    cycle: list[object] = [axis]
    cycle.append(cycle)

torch.set_num_threads(1)
before = threads()
with join_world("cpu") as world:
    use(world)
    assert threads() > before
assert threads() == before
"""


def test_no_thread_of_a_group_outlives_the_world() -> None:
    """One that still lets go of a message while Python ends aborts the process, and nobody waits for cycles."""
    assert start_ranks([sys.executable, "-c", LEAVES], 2) == 0
