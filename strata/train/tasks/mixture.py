"""The training mixture: document `index` is a function of seed and index, so any position can be reached directly; and
several tools that are offered together, with what is asked then: what one of them is for, or what none is for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from strata.train.tasks import (
    arithmetic,
    calculators,
    converters,
    dates,
    lookups,
    numbers,
    smalltalk,
    spelling,
    stories,
    tables,
    units,
)
from strata.train.tasks.example import Example, Offer, Task
from strata.train.tasks.smalltalk import UNKNOWN
from strata.train.tasks.tool import ExerciseTool

_FAMILIES = (arithmetic, numbers, spelling, units, dates, tables, stories, smalltalk)
TASKS: tuple[Task, ...] = tuple(task for one in _FAMILIES for task in one.TASKS)
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


Maker = Callable[[random.Random], Offer]

FAMILIES: dict[str, tuple[Maker, ...]] = {
    calculators.TASK: (calculators.calculator, calculators.calculator, calculators.one_operation),
    converters.TASK: (converters.converter, converters.converter, converters.unit_table),
    lookups.TASK: (lookups.look_up, lookups.look_up, lookups.look_up, lookups.table),
}


@dataclass(frozen=True)
class Toolbox:
    """Tools of which no two are for the same, in the order in which they are shown."""

    offers: tuple[Offer, ...]

    @property
    def tools(self) -> tuple[ExerciseTool, ...]:
        return tuple(offer.tool for offer in self.offers)

    def question(self, rng: random.Random, task: str | None = None) -> Example:
        """A question for one of the tools, of those whose questions are scored as `task` if that is given."""
        fitting = [offer for offer in self.offers if task in (None, offer.task)]
        offer = rng.choice(fitting)
        example = self.offered(offer.question(rng))
        if rng.random() < 0.9:
            return example
        hint = rng.choice((" Use the tool.", " Use the tools.", " Use a tool.", f" Use {offer.tool.name}."))
        return replace(example, question=example.question + hint)

    def offered(self, example: Example) -> Example:
        """The example where the model is offered these tools."""
        return replace(example, tools=self.tools)

    def answers(self, example: Example) -> bool:
        """Whether one of the tools is for this question."""
        return any(offer.answers(example) for offer in self.offers)

    def unanswered(self, rng: random.Random) -> Example:
        """A question for a look-up that is not here: the model does not know that. Not scored."""
        subjects = {subject for offer in self.offers for subject in offer.subjects}
        while (other := lookups.look_up(rng)).subjects & subjects:
            pass
        question = other.question(rng).question
        return self.offered(Example("tools of no use", question, UNKNOWN, None, f"unanswered {question}", False))


def toolbox(rng: random.Random, family: str | None = None) -> Toolbox:
    """One to four tools; with `family`, a task's name, at least one whose questions are scored as that."""
    count = rng.choice((1, 1, 2, 2, 3, 4))
    offers = [_draw(rng, family)]
    while len(offers) < count:
        other = _draw(rng, None)
        if not any(other.subjects & one.subjects or other.tool.name == one.tool.name for one in offers):
            offers.append(other)
    rng.shuffle(offers)
    return Toolbox(tuple(offers))


def _draw(rng: random.Random, family: str | None) -> Offer:
    return rng.choice(FAMILIES[family or rng.choice(tuple(FAMILIES))])(rng)


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
