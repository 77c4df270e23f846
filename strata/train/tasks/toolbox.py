"""Several tools that are offered together, and what is asked then: what one of them is for, or what none is for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata.train.tasks import calculators, converters, lookups
from strata.train.tasks.example import Example, Offer
from strata.train.tasks.smalltalk import UNKNOWN
from strata.train.tasks.tool import ExerciseTool

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
    families: Sequence[str] = tuple(FAMILIES)
    return rng.choice(FAMILIES[family or rng.choice(families)])(rng)
