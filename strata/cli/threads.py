"""How threads of a CPU wait for each other; it has to be said before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Of the loop in which GNU's OpenMP looks for work, some 30 us: the next product of a step comes sooner. Its own 300,000
# keep cores busy that others wait for.
_SPINS = "10000"


def set_waiting(arguments: list[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait sleep soon, those of training at once, unless the environment says what they do.

    arguments: of the command line. Where training shares its cores with anything else, a small step takes many times as
    long if threads spin.
    """
    if "OMP_WAIT_POLICY" in environment:
        return
    if _trains(arguments):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)


def _trains(arguments: list[str]) -> bool:
    command, given = arguments[:1], arguments[1:]
    explains_a_run = any(one == "--run" or one.startswith("--run=") for one in given)
    return command == ["train"] or (command == ["explain"] and explains_a_run)
