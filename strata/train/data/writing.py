"""Writing many shards with several processes, so that a run that was stopped goes on with those that are missing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import msgspec

from strata.train.data.shards import ShardEntry, write_atomically

MANIFEST = "plan.json"
Source = TypeVar("Source")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardJob:
    """One shard to write, maybe by another process."""

    folder: Path
    name: str

    def write(self) -> ShardEntry:
        """Write its files."""
        raise NotImplementedError

    def write_whole(self) -> ShardEntry:
        """Its entry as JSON beside it, last, says that it is whole."""
        entry = self.write()
        write_atomically(self.folder / f"{self.name}.json", msgspec.json.encode(entry))
        return entry

    def finished(self) -> ShardEntry | None:
        """The entry of a shard that is whole."""
        try:
            entry = msgspec.json.decode((self.folder / f"{self.name}.json").read_bytes(), type=ShardEntry)
        except (OSError, ValueError):
            return None
        return entry if all((self.folder / file).is_file() for file in entry.sha256) else None


def named(sources: Iterable[Source]) -> Iterator[tuple[str, Source]]:
    """What shards are made of, each with the name of its shard."""
    return ((f"shard-{number:05}", source) for number, source in enumerate(sources))


def write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    """Write down what `out` is made of. Raises ValueError if anything has been made of something else there."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / MANIFEST).exists() or all(path.name == MANIFEST for path in out.rglob("*.json")):
        write_atomically(out / MANIFEST, json.dumps(manifest, indent=1).encode())
        return
    before = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    if different := [key for key in manifest if manifest[key] != before.get(key)]:
        raise ValueError(
            f"{out} holds data made with other {' and '.join(different)}; choose another folder, or remove it"
        )


def write_missing(jobs: Sequence[ShardJob], workers: int, report: Callable[[int, int], None]) -> list[ShardEntry]:
    """The shards of all jobs, in their order; those that are not there are written by `workers` processes.

    report: called with the number of finished shards and of all.
    """
    entries = {job.name: entry for job in jobs if (entry := job.finished()) is not None}
    report(len(entries), len(jobs))
    # Closed at once, also where `report` is interrupted: the processes end with it.
    with closing(_run([job for job in jobs if job.name not in entries], workers)) as written:
        for entry in written:
            entries[entry.name] = entry
            report(len(entries), len(jobs))
    return [entries[job.name] for job in jobs]


def _run(jobs: Sequence[ShardJob], workers: int) -> Generator[ShardEntry]:
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield job.write_whole()
        return
    with _processes(min(workers, len(jobs))) as pool:
        with _children_not_interrupted():
            futures = [pool.submit(job.write_whole) for job in jobs]
        for future in as_completed(futures):
            yield future.result()


def in_process(call: Callable[[], Result]) -> Result:
    """What a call gives that another process makes, which Ctrl-C ends at once, whatever it does."""
    with _processes(1) as pool:
        with _children_not_interrupted():
            future = pool.submit(call)
        return future.result()


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, also when they have work left: shards take long, and are written again."""
    others = set(active_children())
    pool = ProcessPoolExecutor(count, get_context("spawn"), _init_worker)
    try:
        yield pool
    except BrokenProcessPool:
        raise ValueError(
            "a process that writes shards was killed, perhaps for lack of memory; "
            "run the same command with fewer workers: finished shards are kept"
        ) from None
    finally:
        for process in set(active_children()) - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _children_not_interrupted() -> Iterator[None]:
    """Ctrl-C goes to every process of a terminal: those started here leave it to this one, which ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker() -> None:
    """One thread a process, for the processes share the host already; and none outlives the one that started it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
    os._exit(1)
