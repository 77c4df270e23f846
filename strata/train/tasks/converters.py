"""Tools that convert a quantity to another unit, and tables that tell how much one unit is in another."""

from __future__ import annotations

import random
from decimal import Decimal

from strata.train.tasks.example import Example, Offer, ask, is_held_out
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.units import TEXTS as UNIT_TEXTS
from strata.train.tasks.units import any_conversion, named_units, plain
from strata.train.tasks.words import pseudo_word, texts

TASK = "calling a unit table"

TEXTS = texts("converters")
_SUBJECTS = frozenset({"unit conversion"})


def converter(rng: random.Random) -> Offer:
    """A tool that takes a value and two units."""
    value, (source, target) = rng.choice(TEXTS["values"]), rng.choice(TEXTS["ends"]).split("/")
    order = rng.choice(((0, 1, 2), (0, 1, 2), (1, 2, 0)))
    arguments = (Argument(value, "number"), Argument(source), Argument(target))
    tool = ExerciseTool(rng.choice(TEXTS["names"]), rng.choice(TEXTS["about"]), tuple(arguments[i] for i in order))

    def question(rng: random.Random) -> Example:
        asked = (_known if rng.random() < 0.4 else _unknown)(rng)
        given = (float(asked.value) if "." in asked.value else int(asked.value), asked.source, asked.target)
        call = ExerciseCall(tool.name, tuple((arguments[i].name, given[i]) for i in order), asked.told(rng))
        asking = ask(rng, UNIT_TEXTS["convert"], value=asked.value, source=asked.source, target=asked.target)
        return asked.example(asking, call)

    return Offer(tool, TASK, question, _SUBJECTS, _SUBJECTS)


def unit_table(rng: random.Random) -> Offer:
    """A tool that tells how much one of a unit is in another."""
    source, target = rng.choice(TEXTS["ends"]).split("/")
    name, about = rng.choice(TEXTS["tables"]), rng.choice(TEXTS["table_about"])
    tool = ExerciseTool(name, about, (Argument(source), Argument(target)))

    def question(rng: random.Random) -> Example:
        asked = _unknown(rng, one=True)
        call = ExerciseCall(tool.name, ((source, asked.source), (target, asked.target)), asked.told(rng))
        return asked.example(ask(rng, TEXTS["one"], source=asked.source, target=asked.target), call)

    return Offer(tool, TASK, question, _SUBJECTS, _SUBJECTS)


class _Asked:
    """value of source is result of target."""

    def __init__(self, value: str, source: str, result: str, target: str, problem: str, held_out: bool) -> None:
        self.value, self.source, self.result, self.target = value, source, result, target
        self.problem, self.held_out = problem, held_out

    def told(self, rng: random.Random) -> str:
        """The result as the tool gives it."""
        key = rng.choice(("result", "value", "factor"))
        return rng.choice((
            self.result, self.result, f"{self.result} {self.target}", f'{{"{key}": {self.result}}}',
            f'{{"{key}": {self.result}, "unit": "{self.target}"}}',
        ))  # fmt: skip

    def example(self, question: str, call: ExerciseCall) -> Example:
        answer = f"{self.result} {self.target}"
        reply = f"{self.value} {self.source} = {answer}\nAnswer: {answer}"
        return Example(TASK, question, reply, answer, self.problem, self.held_out, call=call)


def _known(rng: random.Random) -> _Asked:
    """What the model could convert on its own."""
    made = any_conversion(rng)
    source, target = named_units(rng, made)
    return _Asked(made.value, source, made.result, target, made.problem, made.held_out)


def _unknown(rng: random.Random, *, one: bool = False) -> _Asked:
    """What only the tool knows."""
    (source, sources), (_, targets) = _unit(rng), _unit(rng)
    value = "1" if one else plain(Decimal(rng.randrange(1, 10 ** rng.choice((1, 2, 3, 4)))) / rng.choice((1, 1, 1, 10)))
    result = plain(Decimal(rng.randrange(1, 10 ** rng.choice((2, 3, 4, 5, 6)))) / 10 ** rng.choice((0, 0, 1, 2, 3)))
    problem = f"convert {value} {source} {targets}"
    return _Asked(value, source if value == "1" else sources, result, targets, problem, is_held_out(problem))


def _unit(rng: random.Random) -> list[str]:
    """Singular and plural, of a word of no language as often as not."""
    if rng.random() < 0.5:
        return rng.choice(TEXTS["foreign"]).split("/")  # type: ignore[no-any-return]
    word = pseudo_word(rng)
    return [word, f"{word}s"]
