"""The training mixture: document `index` is a function of seed and index, so any position can be reached directly."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from strata.train.tasks import arithmetic, dates, numbers, smalltalk, spelling, stories, tables, units
from strata.train.tasks.example import Example, Task

TASKS: tuple[Task, ...] = (
    *arithmetic.TASKS,
    *numbers.TASKS,
    *spelling.TASKS,
    *units.TASKS,
    *dates.TASKS,
    *tables.TASKS,
    *stories.TASKS,
    *smalltalk.TASKS,
)
_CUMULATIVE = tuple(accumulate(task.weight for task in TASKS))

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "Answer briefly.",
    "You are Strata.",
)


@dataclass(frozen=True)
class Document:
    """One training sequence: a conversation, or with `plain` a question and its reply without chat markers."""

    examples: tuple[Example, ...]
    system: str | None = None
    plain: bool = False


def training_example(rng: random.Random) -> Example:
    """A random example that is not held out."""
    task = rng.choices(TASKS, cum_weights=_CUMULATIVE)[0]
    while (example := task.sample(rng)).held_out:
        pass
    return example


def document(seed: int, index: int) -> Document:
    """Document `index` of the mixture: mostly one question, sometimes two or three in one conversation."""
    rng = random.Random(f"train {seed} {index}")
    draw = rng.random()
    if draw < 0.06:
        return Document((training_example(rng),), plain=True)
    turns = 1 if draw < 0.76 else 2 if draw < 0.93 else 3
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.05 else None
    return Document(tuple(training_example(rng) for _ in range(turns)), system)


def held_out_examples(task: Task, count: int, seed: int = 0) -> list[Example]:
    """Up to `count` held-out examples of a task, no problem twice; fewer when the task has fewer problems."""
    rng = random.Random(f"held out {seed} {task.name}")
    found: dict[str, Example] = {}
    for _ in range(400 * count):
        example = task.sample(rng)
        if example.held_out and example.answer is not None:
            found.setdefault(example.problem, example)
            if len(found) == count:
                break
    return list(found.values())
