"""The processes of a server, by what Linux tells of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from strata.engine.ranks.followers import MODULE as FOLLOWER
from strata.serve.processes.launch import ENGINE_MODULE

_PROC = Path("/proc")


@dataclass(frozen=True, order=True)
class Process:
    """started: in ticks since the system did. A later process may have the same number, not both."""

    started: int
    pid: int


@dataclass(frozen=True)
class EngineProcesses:
    """ranks: in their order, rank 0 first. all: those and what they have started."""

    ranks: list[Process]
    all: list[Process]


def engine_of(server: int) -> EngineProcesses | None:
    """Of the engine that a server runs; None if there is none. Ranks are started one after the other."""
    for engine in descendants(server):
        if _runs(engine, ENGINE_MODULE):
            own = descendants(engine.pid)
            followers = sorted(one for one in own if _runs(one, FOLLOWER))
            return EngineProcesses([engine, *followers], [engine, *own])
    return None


def descendants(pid: int) -> list[Process]:
    """The processes that it has started, and these in turn."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir(_PROC):
        if name.isdecimal() and (found := _stat(int(name))) is not None:
            parent, process = found
            children.setdefault(parent, []).append(process)
    all_of_them, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        all_of_them += below
        ahead += [one.pid for one in below]
    return all_of_them


def is_there(process: Process) -> bool:
    """Whether it runs, is stopped, or has ended and nobody has taken note of that."""
    found = _stat(process.pid)
    return found is not None and found[1] == process


def _stat(pid: int) -> tuple[int, Process] | None:
    """The parent's number, and the process; see proc_pid_stat(5)."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    return int(fields[1]), Process(int(fields[19]), pid)


def _runs(process: Process, module: str) -> bool:
    try:
        return module.encode() in (_PROC / str(process.pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
