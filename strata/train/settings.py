"""How a process is set while it trains.

It has its folder for itself, deterministic kernels, and no garbage collection in the middle of a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from strata.files.locks import lock


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic kernels inside, if wanted, so that a resumed run repeats the bits; undone at the end."""
    if not wanted:
        yield
        return
    # cuBLAS is deterministic only with workspaces of a fixed size; it reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Not "warn": FlashAttention's backward takes its deterministic path only when determinism is demanded. And not by
    # torch.use_deterministic_algorithms, which imports Inductor, a second, for steps that it does not compile.
    torch.set_deterministic_debug_mode("error")
    # Results are written whole before they are read; filling them first would cost a pass over memory each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def collected_between_steps() -> Iterator[None]:
    """No garbage collection of its own accord, which can hold a step up for hundreds of milliseconds."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Inside, no other run may use the folder; its processes may. However this one ends, the folder is free again.

    Raises ValueError if another run uses it.
    """
    with (folder / "lock").open("a") as stream:
        lock(stream, f"another process trains in {folder}; wait for its end, or choose another out")
        yield
