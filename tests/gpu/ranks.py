"""Functions of tests that run on several GPUs, a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch


def require_gpus(ranks: int) -> None:
    """Skips the test where GPUs are missing."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


def found_by_ranks(
    run: Callable[[Any], Any], ranks: int, folder: Path, timeout: float, *, joined: bool = True
) -> list[Any]:
    """What a function at the top of a module returns on each rank, called with its `World`; if the ranks are not
    joined, with its number. Skips the test where GPUs are missing."""
    require_gpus(ranks)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    given = (run.__module__, run.__qualname__, str(folder), "joined" if joined else "apart")
    subprocess.run([*launch, "-m", __name__, *given], check=True, timeout=timeout)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    module, name, folder, how = sys.argv[1:]
    run = getattr(import_module(module), name)
    if how == "apart":
        rank = int(os.environ["RANK"])
        found = run(rank)
    else:
        with join_world("cuda", timeout_seconds=120) as world:
            rank, found = world.rank, run(world)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
