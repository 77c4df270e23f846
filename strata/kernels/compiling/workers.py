"""Compiles variants in processes: Triton's front end holds the interpreter's lock, so threads would wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, libcuda_dirs
from triton.runtime.cache import triton_key

from strata.kernels.compiling.variant import Variant


@dataclass(frozen=True)
class Outcome:
    """What became of a variant.

    entry: its folder in the cache. seconds: of its process. found: it was there already. fault: why it could not be
    compiled, None if it was.
    """

    variant: Variant
    entry: str
    seconds: float
    found: bool
    fault: str | None = None


class Workers:
    """Processes that compile into the cache on the disk while this one finds out what else is to be compiled.

    They are forks, so that none has to import anything: the process that makes this has no CUDA context and runs no
    threads. `initialize` runs first in each.
    """

    def __init__(self, target: GPUTarget, count: int, initialize: Callable[[], None]) -> None:
        self._target = target
        triton_key()  # reads the whole of Triton's library: once, and not in each fork
        self._pool = ProcessPoolExecutor(count, get_context("fork"), initialize)
        self._pool.submit(_compile_driver)  # with the first job all forks are made, before there are other threads
        self._futures: list[Future[Outcome]] = []

    def add(self, variant: Variant) -> None:
        self._futures.append(self._pool.submit(_compile, variant, self._target))

    def outcomes(self) -> Iterator[Outcome]:
        """Of each variant once it has been tried. Raises BrokenProcessPool if a process was killed."""
        return (future.result() for future in as_completed(self._futures))

    def close(self) -> None:
        """Begin with nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(variant: Variant, target: GPUTarget) -> Outcome:
    start = time.perf_counter()
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    entry, fault = "", None
    try:
        kernel = variant.compile(target)
        entry = Path(next(iter(kernel.metadata_group.values()))).parent.name
        if _has_driver_library():
            CudaLauncher(kernel.src, kernel.metadata)  # what puts the arguments in place, compiled by a C compiler
    except Exception as error:  # whatever a compiler raises: the kernel is compiled again where it is wanted
        fault = f"{type(error).__name__}: {error}"
    return Outcome(variant, entry, time.perf_counter() - start, found=hits == [True], fault=fault)


def _compile_driver() -> None:
    """What loads kernels, compiled by a C compiler too."""
    if _has_driver_library():
        CudaUtils()


@cache
def _has_driver_library() -> bool:
    """Without CUDA's driver, on a machine that compiles for others, nothing can be linked with it."""
    try:
        found: Any = libcuda_dirs()
    except (AssertionError, OSError):
        return False
    return bool(found)
