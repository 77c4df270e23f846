"""Recordings that may hold messages: all must be gone before the ranks part, because NCCL's end waits for each of them.

One that somebody still keeps, if only in a cycle that no garbage collection has found, would make it wait for ever.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Recordings(Protocol):
    def forget(self) -> None:
        """Free what was recorded. Nothing is replayed after."""


_HELD: WeakSet[Recordings] = WeakSet()


def hold(one: Recordings) -> None:
    """Let `forget_recordings` know of it, as long as somebody else keeps it."""
    _HELD.add(one)


def forget_recordings() -> None:
    """Free all of this process."""
    for one in list(_HELD):
        one.forget()
