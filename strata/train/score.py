"""Held-out accuracy: which questions are asked and whether a reply is right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.train.tasks.example import Example
from strata.train.tasks.mixture import TASKS, TOOL_TASKS, held_out_examples
from strata.train.tasks.tool import CLOSING, OPENING, ExerciseCall

MARK = "Answer:"


@dataclass(frozen=True)
class Score:
    """Right replies of one task."""

    task: str
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


def extract_answer(reply: str) -> str | None:
    """What follows the last "Answer:" on its line; None if the reply has none."""
    _, mark, rest = reply.rpartition(MARK)
    return rest.split("\n", 1)[0].strip() if mark else None


def makes(reply: str, call: ExerciseCall) -> bool:
    """Whether the reply is this call and nothing else, whatever the order of its arguments."""
    if not (reply.startswith(OPENING) and reply.endswith(CLOSING)):
        return False
    try:
        made = json.loads(reply[len(OPENING) : -len(CLOSING)])
    except ValueError:
        return False
    return bool(made == {"name": call.name, "arguments": dict(call.arguments)})


def questions(examples: int) -> list[Example]:
    """Up to `examples` held-out examples of every scored task."""
    return [example for task in (*TASKS, *TOOL_TASKS) for example in held_out_examples(task, examples)]


def is_right(example: Example, reply: str) -> bool:
    """Whether a reply gives the answer of its example."""
    return extract_answer(reply) == example.answer


def score(examples: Sequence[Example], replies: Iterable[str]) -> list[Score]:
    """The score of each task, in the order in which tasks first occur."""
    correct: dict[str, int] = {}
    total: dict[str, int] = {}
    for example, reply in zip(examples, replies, strict=True):
        total[example.task] = total.get(example.task, 0) + 1
        correct[example.task] = correct.get(example.task, 0) + is_right(example, reply)
    return [Score(task, correct[task], total[task]) for task in total]
