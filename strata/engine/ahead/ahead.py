"""Kernels that are compiled, or brought to the device, while an engine starts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Event, Thread, Timer
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from strata.engine.ahead import manifest
from strata.engine.ahead.manifest import Manifest
from strata.engine.engine_config import EngineConfig
from strata.files.child_modules import command_of, with_package
from strata.kernels.compiling.noting import Variant
from strata.kernels.device_limits import DeviceLimits

Log = Callable[[str], None]

# With more there would be no more than three variants for each.
_MAX_PROCESSES = 32
# Seconds that a start waits for them: ten times what one core takes for a model.
_LONGEST = 600
# Seconds that it waits for another process that compiles; then it compiles beside it.
_LONGEST_WAIT = 120
_NOT_AHEAD = "kernels could not be compiled ahead, so each is when it is first used: {}"


@dataclass(frozen=True)
class Progress:
    """Of the variants noted so far, how many have been tried, and how many of these lay on the disk.

    faults: a line for each that could not be compiled. ended: no more are noted. waits_for: whose
    end it waits for before it begins, if anybody's. variant: the text of the one that has become ready, if one has.
    """

    noted: int = 0
    done: int = 0
    found: int = 0
    faults: tuple[str, ...] = ()
    ended: bool = False
    waits_for: str = ""
    variant: str = ""


class Compiling:
    """A process that compiles all variants of a start, with forks for all cores but one."""

    def __init__(self, asked: EngineConfig, limits: DeviceLimits, said: IO[str]) -> None:
        """said: a file for what it says of errors; compilers may say more than a pipe holds."""
        processes = max(1, min(len(os.sched_getaffinity(0)) - 1, _MAX_PROCESSES))
        job = {"engine": asdict(asked), "device": asdict(limits), "processes": processes}
        job["longest_wait"] = _LONGEST_WAIT
        command = [*command_of("strata.engine.ahead.process"), json.dumps(job)]
        self._said = said
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": said}
        self._process = subprocess.Popen(command, text=True, env=with_package(os.environ), **streams)

    def progress(self) -> Iterator[Progress]:
        """Whenever there is some, until the end. Raises ValueError, with the process's own words, if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = json.loads(line)
            yield Progress(**fields | {"faults": tuple(fields["faults"])})
        if self._process.wait() != 0:
            self._said.seek(0)
            words = self._said.read().strip().splitlines()
            raise ValueError(words[-1] if words else f"exit code {self._process.returncode}")

    def stop(self) -> None:
        """End it, whether it is done or not."""
        self._process.kill()
        self._process.wait()


@contextmanager
def compiling(asked: EngineConfig, limits: DeviceLimits) -> Iterator[Compiling]:
    """Compile until the end of the block; whoever wants the end waits for it inside."""
    with TemporaryFile("w+") as said:
        process = Compiling(asked, limits, said)
        try:
            yield process
        finally:
            process.stop()


def shown(progress: Iterable[Progress], log: Log, *, show: bool) -> Progress:
    """The last, after a bar on standard error has shown each, where that is a terminal. log: is told of waiting."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last = Progress()
    with Bar(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("compiling kernels", total=None)
        for one in progress:
            last = one
            if one.waits_for:
                log(f"kernels: waiting for {one.waits_for}, which compiles already, for {_LONGEST_WAIT} s at most")
            bar.update(task, completed=one.done, total=one.noted)
    return last


class KernelsAhead:
    """The kernels of an engine that starts. What is not ready when it is launched is compiled then."""

    def __init__(self, asked: EngineConfig, device: torch.device, log: Log, *, compiles: bool = True) -> None:
        """compiles: here, what is not on the disk; else another does, and `finish` comes after that."""
        self._compiles = compiles
        self._limits = DeviceLimits.of(device)
        self._asked, self._device, self._log = asked, device, log
        self._told: SimpleQueue[Progress | ValueError | None] = SimpleQueue()
        self._process: Compiling | None = None
        self._holding: Thread | None = None
        self._is_over = Event()
        self._are_held = False

    @contextmanager
    def under_way(self) -> Iterator[KernelsAhead]:
        """Beside what else the start does, those on the disk come to the device; if any is not there, another process
        compiles, and each comes when it is ready. Nothing of that outlasts the block."""
        found = self._read()
        with ExitStack() as beside:  # what is entered last ends first
            if found is not None and found.is_on_disk:
                beside.enter_context(self._beside(self._hold_found, found))
            elif self._compiles:
                following = beside.enter_context(ExitStack())
                try:
                    self._process = beside.enter_context(compiling(self._asked, self._limits))
                except OSError as error:
                    self._log(_NOT_AHEAD.format(error))
                else:
                    following.enter_context(self._beside(self._follow, self._process))
            beside.callback(self._is_over.set)
            yield self

    def finish(self, *, show: bool) -> bool:
        """Wait until they are ready, and tell whether all are. show: with a progress bar."""
        if self._process is not None:
            self._wait(self._process, show)
        if self._holding is not None:
            self._holding.join()
        elif not self._compiles and (found := self._read()) is not None:
            self._hold_found(found)
        return self._are_held

    def _read(self) -> Manifest | None:
        return manifest.read(manifest.key_of(self._asked, self._limits))

    @contextmanager
    def _beside(self, work: Callable[[Any], None], of: Any) -> Iterator[None]:
        """Do it in a thread, which is waited for at the end of the block."""
        self._holding = Thread(target=work, args=(of,), name="kernels")
        self._holding.start()
        try:
            yield
        finally:
            self._holding.join()

    def _wait(self, process: Compiling, show: bool) -> None:
        is_late = Event()

        def stop() -> None:
            is_late.set()
            process.stop()

        stopping = Timer(_LONGEST, stop)
        stopping.start()
        try:
            last = shown(self._progress(), self._log, show=show)
        except ValueError as error:
            self._log(_NOT_AHEAD.format(f"it was not done after {_LONGEST} s" if is_late.is_set() else error))
            return
        finally:
            stopping.cancel()
        for fault in last.faults:
            self._log(f"could not be compiled ahead: {fault}")
        compiled = last.done - last.found - len(last.faults)
        self._log(f"kernels: {compiled} compiled, {last.found} found on the disk")

    def _progress(self) -> Iterator[Progress]:
        """What the thread has heard."""
        while (one := self._told.get()) is not None:
            if isinstance(one, ValueError):
                raise one
            yield one

    def _follow(self, process: Compiling) -> None:
        """Bring each variant to the device when it has been compiled, and pass on what the process tells."""
        try:
            last = Progress()
            are_held = True
            for last in process.progress():
                if last.variant and are_held:
                    are_held = self._hold([Variant(last.variant)])
                self._told.put(last)
            self._are_held = are_held and last.ended and not last.faults
        except ValueError as error:
            self._told.put(error)
        finally:
            self._told.put(None)

    def _hold_found(self, found: Manifest) -> None:
        self._are_held = self._hold(found.variants)

    def _hold(self, variants: Iterable[Variant]) -> bool:
        """Bring them to the device, and tell whether all are there."""
        try:
            with torch.cuda.device(self._device):
                for variant in variants:
                    if self._is_over.is_set():  # the start has failed, or is broken off
                        return False
                    variant.hold()
        except Exception as error:  # whatever it is, kernels are compiled when they are launched
            self._log(f"kernels could not be brought to the device ahead: {type(error).__name__}: {error}")
            return False
        return True
