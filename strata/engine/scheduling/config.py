"""What a scheduler is told before it starts, and what it tells: why sequences wait, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from strata.engine.scheduling.prompt_budget import StepTarget


@dataclass(frozen=True)
class SchedulerConfig:
    """max_sequences: slots; max_tokens: tokens of one step; max_length: tokens of one sequence, prompt and output;
    seed: of the requests that bring none; target: of steps with decodes, so that prompts make none too long for them;
    None: prompts take what decodes leave of `max_tokens`.

    draws: the most ids that a step may bring a sequence: it runs so many rows less one of drafts. They take what tokens
        and pages nobody else wants; where rows would need masks that only the ids before them tell, there are none.
    stages: how many stages of a pipeline work at once, each on a step of other sequences.
    rank, ranks: whose sequences these are, of ranks that have sequences of their own: their ids are rank, rank + ranks
    and so on.

    No more sequences run at once than a step has tokens, so that each of them gets on at every step.
    """

    max_sequences: int
    max_tokens: int
    max_length: int
    seed: int = 0
    target: StepTarget | None = None
    stages: int = 1
    rank: int = 0
    ranks: int = 1
    draws: int = 1

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "max_length", "draws", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


Holdup = Literal["slot", "pages", "step_full", "prefix"]
"""What those that wait lack: a slot; KV pages; room for prompts in the step, which others take; a prefix that a step
under way computes, or that comes from elsewhere."""
HOLDUPS: tuple[Holdup, ...] = get_args(Holdup)


class Waiting(NamedTuple):
    """holdup: of the first that waits, and so of all behind it; None if nobody does. preempted: sequences that wait
    since this step, because their pages were taken."""

    holdup: Holdup | None = None
    preempted: tuple[int, ...] = ()


NOBODY = Waiting()


@dataclass
class Statistics:
    """Counts since the start. Prefix queries and hits are prompt tokens looked up and found at first admissions."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
