"""Why sequences wait, as a scheduler tells it of each step that it plans."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Holdup = Literal["slot", "pages", "step_full", "prefix"]
"""What those that wait lack: a slot; KV pages; room for prompts in the step, which others take; a prefix that a step
under way computes, or that comes from elsewhere."""
HOLDUPS: tuple[Holdup, ...] = get_args(Holdup)


class Held(NamedTuple):
    """holdup: of the first that waits, and so of all behind it; None if nobody does. preempted: sequences that wait
    since this step, because their pages were taken."""

    holdup: Holdup | None = None
    preempted: tuple[int, ...] = ()


NOBODY = Held()
