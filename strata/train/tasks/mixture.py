"""The training mixture: document `index` is a function of seed and index, so any position can be reached directly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from strata.train.tasks import arithmetic, dates, numbers, smalltalk, spelling, stories, tables, units
from strata.train.tasks.example import Example, Task
from strata.train.tasks.tool import ExerciseTool
from strata.train.tasks.toolbox import FAMILIES, Toolbox, toolbox

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
WITH_TOOLS = 0.2
"""The share of the conversations in which tools are offered."""
_CUMULATIVE = tuple(accumulate(task.weight for task in TASKS))

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "Answer briefly.",
    "You are Strata.",
)


@dataclass(frozen=True)
class ExerciseDocument:
    """One training sequence: a conversation, or with `plain` a question and its reply without chat markers."""

    examples: tuple[Example, ...]
    system: str | None = None
    plain: bool = False

    @property
    def tools(self) -> tuple[ExerciseTool, ...]:
        """What the model is offered in all of the conversation."""
        return self.examples[0].tools


def training_example(rng: random.Random) -> Example:
    """A random example that is not held out, without tools."""
    task = rng.choices(TASKS, cum_weights=_CUMULATIVE)[0]
    while (example := task.sample(rng)).held_out:
        pass
    return example


def document(seed: int, index: int) -> ExerciseDocument:
    """Document `index` of the mixture: mostly one question, sometimes two or three in one conversation."""
    rng = random.Random(f"train {seed} {index}")
    draw = rng.random()
    if draw < 0.06:
        return ExerciseDocument((training_example(rng),), plain=True)
    turns = 1 if draw < 0.76 else 2 if draw < 0.93 else 3
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.08 else None
    if rng.random() < WITH_TOOLS:
        box = toolbox(rng)
        return ExerciseDocument(tuple(_training_example_with(rng, box) for _ in range(turns)), system)
    return ExerciseDocument(tuple(training_example(rng) for _ in range(turns)), system)


def _training_example_with(rng: random.Random, box: Toolbox) -> Example:
    """A random example that is not held out, with tools: two of three times what one of them is for."""
    draw = rng.random()
    if draw < 0.10:
        return box.unanswered(rng)
    while (example := box.question(rng) if draw < 0.68 else _without_use(rng, box)).held_out:
        pass
    return example


def _without_use(rng: random.Random, box: Toolbox) -> Example:
    """A random example that the model answers itself though it is offered tools, which are for something else."""
    while box.answers(example := rng.choices(TASKS, cum_weights=_CUMULATIVE)[0].sample(rng)):
        pass
    return box.offered(example)


def _of_family(rng: random.Random, family: str) -> Example:
    return toolbox(rng, family).question(rng, family)


def _of_no_use(rng: random.Random) -> Example:
    return replace(_without_use(rng, toolbox(rng)), task="tools of no use")


# Asked with tools only. Weights have no meaning: of what they share in, documents decide.
TOOL_TASKS: tuple[Task, ...] = (
    *(Task(family, 1, partial(_of_family, family=family)) for family in FAMILIES),
    Task("tools of no use", 1, _of_no_use),
)


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
