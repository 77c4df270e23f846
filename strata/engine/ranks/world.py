"""The process group of an engine's ranks, all of them on this machine."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # there without being listed
from torch.distributed.distributed_c10d import Store

from strata.comm.launch import WITHOUT_MULTICAST, World, connected
from strata.comm.mesh import Axis, Mesh
from strata.comm.symmetric import with_symmetric_memory
from strata.engine.engine_config import EngineConfig
from strata.graph.ranks.hierarchical_sums import ACROSS_AXIS, INSIDE_AXIS
from strata.parallel.serving_shard import KEYS_AXIS, TENSOR_AXIS

_HOST = "127.0.0.1"
# In which all ranks connect once all have come so far; one that ends meanwhile leaves the others waiting for so long.
_JOIN_SECONDS = 60.0
# Longer than any step: a rank that hangs is found by its beats (`Followers`), whatever its messages wait for.
_LONGEST_SECONDS = 3600.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def meeting_place(ranks: int) -> TCPStore:
    """What rank 0 keeps so that the others find it: a store at a free port that this machine alone reaches. Raises
    ValueError if it cannot listen there, or the process belongs to a group already."""
    if dist.is_initialized():
        raise ValueError(
            "this process belongs to a process group of torch.distributed already, as every engine over several ranks "
            "does: end the other engine first (del llm), or start this one in a process of its own"
        )
    listener = socket.socket()
    try:
        listener.bind((_HOST, 0))
        listener.listen(ranks)
    except OSError as error:
        listener.close()
        raise ValueError(f"no port of {_HOST} can be listened on, where ranks meet: {error.strerror}") from None
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, ranks, True, wait_for_workers=False, master_listen_fd=listener.detach())


def store_at(port: int, ranks: int) -> TCPStore:
    """The store of rank 0, for another rank."""
    return TCPStore(_HOST, port, ranks, False, wait_for_workers=False, timeout=timedelta(seconds=60))


def join(store: Store, index: int, asked: EngineConfig, device: torch.device) -> tuple[World, dict[str, Axis]]:
    """Connect with the other ranks, which do the same at this time. Returns also the axes on which this one lies, by
    name."""
    sizes, key_ranks, group = asked.axis_sizes, asked.decode_context_parallel_size, asked.all_reduce_group_size
    os.environ.update(WITHOUT_MULTICAST)  # whoever asks for it does not get it
    # Messages that travel beside products would otherwise begin once all programs of a product have.
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    distributed_c10d._world.group_count = 0  # groups meet by their number, and one that failed here has counted
    with _loopback():
        world = connected(store, index, index, asked.ranks, device, timeout_seconds=_JOIN_SECONDS)
    mesh = Mesh.of(world, sizes)
    axes = {name: mesh.axis(name) for name in sizes}
    if key_ranks > 1:
        axes[KEYS_AXIS] = mesh.neighbours(KEYS_AXIS, key_ranks)
    if group > 1:
        axes[INSIDE_AXIS] = mesh.neighbours(INSIDE_AXIS, group)
        axes[ACROSS_AXIS] = mesh.neighbours(ACROSS_AXIS, group, apart=True)
    for axis in axes.values():
        if axis.group is not None:
            distributed_c10d._set_pg_timeout(timedelta(seconds=_LONGEST_SECONDS), axis.group)
    if device.type == "cuda":
        axes[TENSOR_AXIS] = with_symmetric_memory(axes[TENSOR_AXIS], device)
    return world, axes


def leave(world: World) -> None:
    """Leave the group, in which nothing is under way; others have ended."""
    world.shut_down()
    abort(world)  # in an orderly end NCCL would wait for the others
    with suppress(Exception):  # it may be broken already
        dist.destroy_process_group()
    gc.collect()  # see `join_world`


def abort(world: World) -> None:
    """Break off what waits for a rank that has ended."""
    world.on_shutdown.clear()
    if world.device.type == "cuda":  # gloo sees by itself that a connection has ended
        for group in list(distributed_c10d._world.pg_names):
            with suppress(Exception):
                group._get_backend(world.device).abort()


@contextmanager
def _loopback() -> Iterator[None]:
    """gloo would look up the name of the machine, which need not lead to it."""
    before = os.environ.get(_GLOO_INTERFACE)
    if before is None and sys.platform == "linux":
        os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_GLOO_INTERFACE, None)
