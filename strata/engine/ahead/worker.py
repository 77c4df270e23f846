"""What the process that compiles ahead of a start does; `strata.engine.ahead.process` starts it.

It prints a line of JSON whenever something is done: {"noted": variants so far, "done": how many of them are compiled,
"found": how many of these lay on the disk, "variant": the text of the one that is ready now}; at the end also `"ended":
true` and `"faults"`, of each kernel that could not be compiled a line; and it leaves the manifest. While it waits for
another that compiles, `"waits_for"` says for whom. It ends with its parent. Errors are a line on standard error and
exit code 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from triton import knobs

from strata.engine.ahead import manifest
from strata.engine.ahead.derive import note_variants, target_of
from strata.engine.engine_config import EngineConfig
from strata.engine.lifeline import end_with_parent
from strata.files.locks import wait_for
from strata.kernels.compiling.noting import Variant
from strata.kernels.compiling.workers import Outcome, Workers
from strata.kernels.device_limits import DeviceLimits

# These take one to two seconds each, where others take a third: the last of them must not begin when all else ends.
SLOW = frozenset({"filter_bounds_kernel", "attention_kernel", "decode_attention_kernel"})


def main() -> None:
    """Compile what `sys.argv` asks for."""
    job = json.loads(sys.argv[1])
    device = job["device"]
    limits = DeviceLimits(device["product"], tuple(device["capability"]), device["shared_bytes"], device["processors"])
    # Compilers print to standard output, also those of the forks.
    with os.fdopen(os.dup(1), "w", buffering=1) as tells:
        os.dup2(2, 1)
        try:
            compile_ahead(EngineConfig(**job["engine"]), limits, job["processes"], job["longest_wait"], tells)
        except ValueError as error:
            sys.exit(str(error))


def compile_ahead(
    asked: EngineConfig, limits: DeviceLimits, processes: int, longest_wait: float, tells: IO[str]
) -> None:
    """Compile all variants of a start while they are being found out, and write its manifest.

    longest_wait: seconds, for another process that compiles.
    """
    # Before the lock is taken, so that no fork holds it.
    workers = Workers(target_of(limits), processes, partial(end_with_parent, signal.SIGKILL))
    variants: list[Variant] = []

    def note(variant: Variant) -> None:
        variants.append(variant)
        workers.add(variant, soon=variant.kernel in SLOW)

    with _alone(longest_wait, lambda other: _tell(tells, 0, [], waits_for=other)):
        try:
            note_variants(asked, limits, note)
            outcomes: list[Outcome] = []
            for outcome in workers.outcomes():
                outcomes.append(outcome)
                _tell(tells, len(variants), outcomes, variant=outcome.variant.text if outcome.fault is None else "")
        finally:
            workers.close()
        compiled = [outcome for outcome in outcomes if outcome.fault is None]
        manifest.write(
            manifest.key_of(asked, limits),
            (outcome.variant for outcome in compiled),
            (outcome.entry for outcome in compiled),
        )
        _tell(tells, len(variants), outcomes, ended=True)


def _tell(tells: IO[str], noted: int, outcomes: list[Outcome], **more: Any) -> None:
    faults = [f"{outcome.variant.name}: {outcome.fault}" for outcome in outcomes if outcome.fault is not None]
    counts = {"noted": noted, "done": len(outcomes), "found": sum(outcome.found for outcome in outcomes)}
    print(json.dumps(counts | {"faults": faults} | more), file=tells, flush=True)


@contextmanager
def _alone(seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """One process of a machine compiles at a time: the next finds what it left.

    seconds: to wait at most; two that compile the same do no harm. tell: is told for whom this one waits.
    """
    folder = Path(knobs.cache.dir)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        stream = (folder / "strata.lock").open("a+")
    except OSError:  # where nothing can be written, each is by itself
        yield
        return
    with stream:
        is_mine = wait_for(stream, 0)
        if not is_mine:
            tell(_holder(stream))
            is_mine = wait_for(stream, seconds)
        if is_mine:
            _sign(stream)
        yield


def _holder(stream: IO[str]) -> str:
    """Who holds the lock, as far as it says so."""
    stream.seek(0)
    number = stream.read(20).strip()
    return f"process {number}" if number.isdecimal() else "another process"


def _sign(stream: IO[str]) -> None:
    with suppress(OSError):  # nobody needs it
        os.ftruncate(stream.fileno(), 0)
        os.write(stream.fileno(), str(os.getpid()).encode())  # at once: closing would fail where the disk is full
