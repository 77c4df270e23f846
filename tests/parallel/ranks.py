"""Runs a function on several ranks at once: gloo processes on this machine, started as torchrun would."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor


def run_ranks(
    function: Callable[..., Any],
    world: int,
    tmp_path: Path,
    *,
    timeout: float = 240.0,
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    job = {"module": function.__module__, "function": function.__name__, "folder": str(tmp_path), "args": args}
    job["collective_seconds"] = collective_seconds
    command = [sys.executable, "-m", "tests.parallel.ranks", json.dumps(job)]
    outputs = [(tmp_path / f"rank-{rank}.txt").open("w+") for rank in range(world)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, env=place, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        _wait(processes, outputs, timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for output in outputs:
            output.close()
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(world)]


def _wait(processes: list[subprocess.Popen[bytes]], outputs: list[TextIO], timeout: float) -> None:
    """Until all have ended well. The first that fails would leave the others waiting for it."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() not in (None, 0) for process in processes):
            break
        time.sleep(0.02)
    codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        said = []
        for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
            output.seek(0)
            said.append(f"rank {rank} ({'still running' if code is None else code}): {output.read()[-4000:]}")
        raise AssertionError(f"ranks failed or took longer than {timeout} s\n" + "\n".join(said))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude of what is wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


def main() -> None:
    """One rank."""
    import torch

    from strata.comm.launch import join_world
    from strata.train.launch import ended_at_once

    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(job["module"]), job["function"])
    folder = Path(job["folder"])
    # An orderly end would wait for messages that others have yet to answer, and they for this rank.
    timeout = job["collective_seconds"]
    with ended_at_once(lambda error: None), join_world("cpu", timeout_seconds=timeout) as world:
        result = function(world, folder, **job["args"])
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
