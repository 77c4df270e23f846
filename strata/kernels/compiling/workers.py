"""Compiles variants in processes: Triton's front end holds the interpreter's lock, so threads would wait for it."""

from __future__ import annotations

import gc
import json
import os
import select
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, libcuda_dirs
from triton.runtime.cache import triton_key

from strata.kernels.compiling.noting import Variant

# Where a variant's text lies in the file that all share, how long it is, and whether its launcher is compiled too. No
# length: what loads kernels is compiled.
_JOB = struct.Struct("qq?")


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


class _Queue:
    """A pipe of jobs. Who finds it empty is told so at once."""

    def __init__(self) -> None:
        self.taking, self.giving = os.pipe()
        os.set_blocking(self.taking, False)


class Workers:
    """Processes that compile into the cache on the disk while this one finds out what else is to be compiled.

    They are forks, so that none has to import anything: the process that makes this has no CUDA context and runs no
    threads. They hold what it has open then. `initialize` runs first in each: to end it with its parent. Each takes the
    next variant whenever it is done with one, those first that are due soon, and tells of it in a line of JSON.
    """

    def __init__(self, target: GPUTarget, count: int, initialize: Callable[[], None]) -> None:
        triton_key()  # reads the whole of Triton's library: once, and not in each fork
        # What is to be compiled waits in a file, which takes any number; a pipe would hold up who writes into it.
        self._texts, self._end = os.memfd_create("variants"), 0
        self._soon, self._later = _Queue(), _Queue()
        self._first: dict[str, Variant] = {}  # of each signature, with which its launcher is compiled
        self._telling: dict[int, int] = {}  # of each process by where it is heard
        for _ in range(count):
            self._start(target, initialize)
        for queue in (self._soon, self._later):
            os.close(queue.taking)
        self._give(self._soon, b"", has_launcher=False)

    @property
    def processes(self) -> list[int]:
        """Their numbers."""
        return list(self._telling.values())

    def add(self, variant: Variant, soon: bool = False) -> None:
        """soon: before those that are not, since it takes long."""
        # Two at once would both compile the launcher that they share.
        is_first = self._first.setdefault(variant.signature, variant) is variant
        self._give(self._soon if soon else self._later, variant.text.encode(), is_first)

    def outcomes(self) -> Iterator[Outcome]:
        """Of each variant once it and its launcher have been tried; nothing more can be added. Raises RuntimeError if a
        process died."""
        launched: set[str] = set()
        waiting: dict[str, list[Outcome]] = {}
        for outcome in self._heard():
            signature = outcome.variant.signature
            if outcome.variant == self._first[signature]:
                launched.add(signature)
                yield from (outcome, *waiting.pop(signature, ()))
            elif signature in launched:
                yield outcome
            else:
                waiting.setdefault(signature, []).append(outcome)

    def _heard(self) -> Iterator[Outcome]:
        """What the processes tell, as they tell it."""
        self._end_queues()
        heard = dict.fromkeys(self._telling, b"")
        with selectors.DefaultSelector() as selector:
            for descriptor in heard:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    content = os.read(key.fd, 1 << 16)
                    *lines, heard[key.fd] = (heard[key.fd] + content).split(b"\n")
                    yield from map(_outcome, lines)
                    if not content:
                        selector.unregister(key.fd)
                        self._join(key.fd)

    def close(self) -> None:
        """End all of them, whatever they are at."""
        self._end_queues()
        for process in self._telling.values():
            os.kill(process, signal.SIGKILL)
        for descriptor in list(self._telling):
            with suppress(RuntimeError):
                self._join(descriptor)
        os.close(self._texts)

    def _start(self, target: GPUTarget, initialize: Callable[[], None]) -> None:
        heard, telling = os.pipe()
        process = os.fork()
        if not process:
            for descriptor in (self._soon.giving, self._later.giving, heard, *self._telling):
                os.close(descriptor)
            _run(target, initialize, self._texts, (self._soon.taking, self._later.taking), telling)
        os.close(telling)
        self._telling[heard] = process

    def _give(self, queue: _Queue, text: bytes, has_launcher: bool) -> None:
        os.pwrite(self._texts, text, self._end)
        # So few bytes go into a pipe, and come out of it, all at once.
        os.write(queue.giving, _JOB.pack(self._end, len(text), has_launcher))
        self._end += len(text)

    def _end_queues(self) -> None:
        for queue in (self._soon, self._later):
            if queue.giving >= 0:
                os.close(queue.giving)
                queue.giving = -1

    def _join(self, heard: int) -> None:
        """Wait for the end of one that tells nothing more. Raises RuntimeError if it died."""
        process = self._telling.pop(heard)
        os.close(heard)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code:
            how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
            raise RuntimeError(f"a process that compiles ended {how}")


def _run(
    target: GPUTarget, initialize: Callable[[], None], texts: int, queues: tuple[int, ...], telling: int
) -> NoReturn:
    """The whole life of a fork, of which no caller of its parent may hear."""
    code = 1
    gc.freeze()  # looking for cycles in what the parent has imported would copy its memory
    try:
        initialize()
        for start, length, has_launcher in _jobs(queues):
            if length:
                _tell(telling, _compile(Variant(os.pread(texts, length, start).decode()), target, has_launcher))
            else:
                _compile_driver()
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 1
    except BaseException:  # it is printed here, as the interpreter does
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _jobs(queues: tuple[int, ...]) -> Iterator[tuple[int, int, bool]]:
    """Until all queues have ended, the next of the first that has one."""
    left = list(queues)
    while left:
        ready, _, _ = select.select(left, [], [])
        try:
            job = os.read(min(ready, key=left.index), _JOB.size)
        except BlockingIOError:  # another process was quicker
            continue
        if job:
            yield _JOB.unpack(job)
        else:
            left.remove(min(ready, key=left.index))


def _tell(telling: int, outcome: Outcome) -> None:
    with os.fdopen(os.dup(telling), "w") as stream:
        told = {"entry": outcome.entry, "seconds": outcome.seconds, "found": outcome.found, "fault": outcome.fault}
        print(json.dumps({"variant": outcome.variant.text} | told), file=stream)


def _outcome(line: bytes) -> Outcome:
    told = json.loads(line)
    return Outcome(Variant(told.pop("variant")), **told)


def _compile(variant: Variant, target: GPUTarget, has_launcher: bool) -> Outcome:
    start = time.perf_counter()
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    entry, fault = "", None
    try:
        kernel = variant.compile(target)
        entry = Path(next(iter(kernel.metadata_group.values()))).parent.name
        if has_launcher and _has_driver_library():
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
