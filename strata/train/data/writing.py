"""Writing many shards with several processes, so that a run that was stopped goes on with those that are missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from strata.train.data.shards import ShardEntry, write_atomically

PLAN = "plan.json"
Source = TypeVar("Source")


@dataclass(frozen=True)
class ShardJob:
    """One shard to write."""

    folder: Path
    name: str


Job = TypeVar("Job", bound=ShardJob)


def named(sources: Iterable[Source]) -> Iterator[tuple[str, Source]]:
    """What shards are made of, each with the name of its shard."""
    return ((f"shard-{number:05}", source) for number, source in enumerate(sources))


def keep_plan(out: Path, plan: dict[str, Any]) -> None:
    """Write down what `out` is made of. Raises ValueError if it is being made of anything else."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PLAN).exists():
        write_atomically(out / PLAN, json.dumps(plan, indent=1).encode())
        return
    before = json.loads((out / PLAN).read_text(encoding="utf-8"))
    if different := [key for key in plan if plan[key] != before.get(key)]:
        raise ValueError(f"{out} holds data made with other {' and '.join(different)}; choose another folder")


def write_missing(
    jobs: Sequence[Job], write: Callable[[Job], ShardEntry], workers: int, report: Callable[[int, int], None]
) -> list[ShardEntry]:
    """The shards of all jobs, in their order; those that are not there are written by `workers` processes.

    write: a function of a module. report: called with the number of finished shards and of all.
    """
    finished = {job.name: entry for job in jobs if (entry := _finished(job)) is not None}
    report(len(finished), len(jobs))
    for entry in _run([job for job in jobs if job.name not in finished], write, workers):
        finished[entry.name] = entry
        report(len(finished), len(jobs))
    return [finished[job.name] for job in jobs]


def _run(jobs: list[Job], write: Callable[[Job], ShardEntry], workers: int) -> Iterator[ShardEntry]:
    whole = partial(_write_whole, write)
    if min(workers, len(jobs)) <= 1:
        yield from map(whole, jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _be_one_of_many) as pool:
        futures = [pool.submit(whole, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a process that writes shards was killed, perhaps for lack of memory; "
                "run the same command with fewer workers: finished shards are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _be_one_of_many() -> None:
    """One thread a process: the processes share the host already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _write_whole(write: Callable[[Job], ShardEntry], job: Job) -> ShardEntry:
    """Write a shard; its entry as JSON beside it, last, says that it is whole."""
    entry = write(job)
    write_atomically(job.folder / f"{job.name}.json", json.dumps(asdict(entry)).encode())
    return entry


def _finished(job: ShardJob) -> ShardEntry | None:
    try:
        entry = ShardEntry(**json.loads((job.folder / f"{job.name}.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None
    return entry if all((job.folder / file).is_file() for file in entry.sha256) else None
