"""Runs a function on several ranks at once: gloo processes on this machine, started as torchrun would."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle, islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from strata.comm.launch import World

# Ranks are forks of a process that has imported what most of them need: that is two to four seconds of each.
_STARTER = multiprocessing.get_context("forkserver")
_STARTER.set_forkserver_preload(
    [
        "strata.comm.launch",
        "strata.train.launch",
        "strata.parallel.fsdp",
        "torch.fx.experimental.symbolic_shapes",  # of the first backward pass from a given gradient
        "tests.parallel.steps",
        "tests.train.train_ranks",
    ]
)


# Below those that the kernel gives to whoever asks for any: the ranks listen a second or more after this was chosen.
_PORTS = cycle(range(first := 10_000 + 20 * (os.getpid() % 1_000), first + 20))


def _free_port() -> int:
    """Of this process's own, one that nobody listens on."""
    for port in islice(_PORTS, 20):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def run_ranks(
    function: Callable[..., Any],
    world: int,
    tmp_path: Path,
    *,
    timeout: float = 600.0,
    collective_seconds: float = 120.0,
    **args: Any,
) -> list[Any]:
    """What `function(world, folder, **args)` returns on each of `world` ranks, in their order.

    function: of a module that can be imported; called inside `join_world("cpu")` with the `World` and a folder that the
    ranks share, where it may leave safetensors files. args and results are JSON. collective_seconds: how long a
    collective waits.

    Raises AssertionError with the errors of all ranks if one fails or if they take longer than `timeout` seconds; no
    process is left.
    """
    common = os.environ | {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    job = {"module": function.__module__, "function": function.__name__, "folder": str(tmp_path), "args": args}
    told = json.dumps(job | {"collective_seconds": collective_seconds})
    processes = []
    try:
        for rank in range(world):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(_STARTER.Process(target=_rank, args=(told, environment), daemon=True))
            processes[-1].start()
        _wait(processes, tmp_path, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world)]


def run_each(functions: Sequence[Callable[..., Any]], world: int, folder: Path) -> dict[str, list[Any]]:
    """What each of these returns on the ranks, all in one start of them, by name."""
    named = [(one.__module__, one.__name__) for one in functions]
    found = run_ranks(one_after_another, world, folder, functions=named)
    return {name: [rank[name] for rank in found] for _, name in named}


def one_after_another(world: World, folder: Path, functions: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {name: getattr(importlib.import_module(module), name)(world, folder) for module, name in functions}


def _wait(processes: list[ForkServerProcess], folder: Path, timeout: float) -> None:
    """Until all have ended well. The first that fails would leave the others waiting for it."""
    deadline = time.monotonic() + timeout
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > deadline or any(process.exitcode not in (None, 0) for process in processes):
            break
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    if any(codes) or None in codes:
        said = []
        for rank, code in enumerate(codes):
            output = _output(folder, rank)
            words = output.read_text()[-4000:] if output.exists() else ""
            said.append(f"rank {rank} ({'still running' if code is None else code}): {words}")
        raise AssertionError(f"ranks failed or took longer than {timeout} s\n" + "\n".join(said))


def _output(folder: Path, rank: str | int) -> Path:
    return folder / f"rank-{rank}.txt"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude of what is wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


def _rank(told: str, environment: dict[str, str]) -> None:
    """One rank, in a process of its own. told: the job as JSON. environment: its variables, all of them."""
    gc.freeze()  # what was imported is no garbage: a run searches for it between its steps
    import torch

    from strata.comm.launch import join_world
    from strata.train.launch import ended_at_once

    job = json.loads(told)
    folder = Path(job["folder"])
    os.environ.clear()
    os.environ |= environment
    with _output(folder, environment["RANK"]).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(job["module"]), job["function"])
    # An orderly end would wait for messages that others have yet to answer, and they for this rank.
    timeout = job["collective_seconds"]
    with ended_at_once(lambda error: None), join_world("cpu", timeout_seconds=timeout) as world:
        result = function(world, folder, **job["args"])
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(result))
