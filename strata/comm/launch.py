"""Which rank this process is: from the environment variables of torchrun, or one process alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from strata.comm.observer import Observer

# Multicast over NVLink is of the whole host, and GPUs of others may be in it: not every host allows it to be set up.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """All processes of a run and the place of this one among them.

    rank: from 0 to size - 1. local_rank: the same among the processes of this machine. device: where this process
    computes. backend: what torch.distributed was started with; None for one process alone, which starts nothing.
    restarts: how often all ranks were started again after one failed. timeout_seconds: how long a collective of any
    group waits for the other ranks before it fails. observer: notified of the collectives along the axes
    of this world; `dataclasses.replace` gives a world one. on_shutdown: called before NCCL ends, which
    waits for every CUDA graph that holds messages: who captures one adds what frees it.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None
    restarts: int = 0
    timeout_seconds: float = 600.0
    observer: Observer | None = field(default=None, repr=False, compare=False)
    on_shutdown: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def shut_down(self) -> None:
        """Wait for the device, and call all that is in `on_shutdown`, once."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self.on_shutdown:
            self.on_shutdown.pop()()

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all: it writes the log and prints."""
        return self.rank == 0


@contextmanager
def join_world(device: str = "auto", *, timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the processes that torchrun, or `strata.train.launch`, started; leave them at the end. Without either the
    world is this process.

    device: "cpu" (gloo), "cuda" (NCCL, and gloo for what lies on the host), or "auto", which is "cuda" where there is
    one. timeout_seconds: see `World`.

    Raises ValueError, before any connection, if the environment or the device cannot be used.
    """
    rank, local_rank, size = _place(os.environ)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    chosen = _device(kind, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    restarts = _count(os.environ, "TORCHELASTIC_RESTART_COUNT", "0")
    if size == 1:
        world = World(0, local_rank, 1, chosen, None, restarts, timeout_seconds)
        yield world
        world.shut_down()
        return
    timeout = timedelta(seconds=timeout_seconds)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps its store when it starts the ranks again: without a prefix they find addresses of those that died.
    store = PrefixStore(f"restart-{restarts}", store)
    world = connected(store, rank, local_rank, size, chosen, restarts=restarts, timeout_seconds=timeout_seconds)
    yield world
    # Not after an error: leaving waits for what is under way, and the other ranks are not told of it but by this one's
    # end, which says who failed first.
    world.shut_down()
    dist.destroy_process_group()
    # Steps hold groups in cycles, and the threads of gloo live as long as these. One that has yet to let go of the last
    # message wants Python's lock for it; if Python has begun to end by then, that aborts the process.
    gc.collect()


def connected(
    store: Store,
    rank: int,
    local_rank: int,
    size: int,
    device: torch.device,
    *,
    restarts: int = 0,
    timeout_seconds: float = 600.0,
) -> World:
    """Connect with the other ranks, who find each other by `store` and call this at the same time; see `World`."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # With its device known, NCCL connects now and not in the middle of the first step.
    bound = device if device.type == "cuda" else None
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, timeout=timeout, device_id=bound, store=store, rank=rank, world_size=size)
    return World(rank, local_rank, size, device, backend, restarts, timeout_seconds)


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, local rank, world size."""
    present = [name for name in _VARIABLES if name in environment]
    if "WORLD_SIZE" not in present or "RANK" not in present:
        if "WORLD_SIZE" in present or "RANK" in present:
            missing = "RANK" if "WORLD_SIZE" in present else "WORLD_SIZE"
            raise ValueError(f"{', '.join(present)} are set, but not {missing}; start the processes with torchrun")
        return 0, 0, 1
    if missing_names := [name for name in _VARIABLES if name not in present]:
        raise ValueError(f"RANK and WORLD_SIZE are set, but not {missing_names[0]}; start the processes with torchrun")
    rank, local_rank, size = (_count(environment, name) for name in _VARIABLES[:3])
    if not 0 <= rank < size:
        raise ValueError(f"RANK = {rank} does not lie below WORLD_SIZE = {size}; start the processes with torchrun")
    return rank, local_rank, size


def _count(environment: Mapping[str, str], name: str, default: str = "") -> int:
    value = environment.get(name, default)
    if not value.isdecimal():
        raise ValueError(f"{name} = {value!r} is not a whole number; start the processes with torchrun")
    return int(value)


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ValueError(f"device {kind!r}: accepted are 'auto', 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda': this machine has no CUDA device; use 'cpu' or 'auto'")
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"process {local_rank} of this machine has no GPU of its own, there are {count}; "
            f"start at most {count} here (torchrun --nproc-per-node {count})"
        )
    return torch.device("cuda", local_rank)
