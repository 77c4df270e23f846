"""Tools that convert a quantity to another unit, and tables that tell how much one unit is in another."""

from __future__ import annotations

import random
from decimal import Decimal

from strata.train.tasks.example import Example, ask, is_held_out
from strata.train.tasks.offer import Offer
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.units import CONVERT, any_conversion, named_units, plain
from strata.train.tasks.words import listed, pseudo_word

TASK = "calling a unit table"

NAMES = listed("convert convert convert_units convert_unit unit_converter converter units change_unit")
TABLES = listed("unit_table unit_table units_table unit_factor factor conversion_table look_up_unit")
VALUES = listed("value value amount quantity number x")
ENDS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in listed("from/to from/to from_unit/to_unit source/target unit_from/unit_to unit/target unit/into")
)
ABOUT = ("Converts units.", "Converts between units.", "Converts a quantity to another unit.", "")
TABLE_ABOUT = ("A table of units.", "How much one unit is in another.", "Factors between units.", "")
ONE = (
    "How many {target} are in one {source}?",
    "How many {target} is one {source}?",
    "What is one {source} in {target}?",
    "How many {target} are in 1 {source}?",
    "One {source} is how many {target}?",
    "1 {source} in {target}",
)
_SUBJECTS = frozenset({"unit conversion"})
# Units that the model converts with a tool or not at all; the others are made up.
FOREIGN = (
    ("mile", "miles"), ("pound", "pounds"), ("ounce", "ounces"), ("gallon", "gallons"), ("pint", "pints"),
    ("acre", "acres"), ("hectare", "hectares"), ("knot", "knots"), ("stone", "stones"), ("furlong", "furlongs"),
    ("barrel", "barrels"), ("joule", "joules"), ("calorie", "calories"), ("watt", "watts"), ("dollar", "dollars"),
    ("pound", "pounds"), ("fathom", "fathoms"), ("cup", "cups"), ("carat", "carats"), ("bushel", "bushels"),
)  # fmt: skip


def converter(rng: random.Random) -> Offer:
    """A tool that takes a value and two units."""
    value, (source, target) = rng.choice(VALUES), rng.choice(ENDS)
    order = rng.choice(((0, 1, 2), (0, 1, 2), (1, 2, 0)))
    arguments = (Argument(value, "number"), Argument(source), Argument(target))
    tool = ExerciseTool(rng.choice(NAMES), rng.choice(ABOUT), tuple(arguments[i] for i in order))

    def question(rng: random.Random) -> Example:
        asked = (_known if rng.random() < 0.4 else _unknown)(rng)
        given = (float(asked.value) if "." in asked.value else int(asked.value), asked.source, asked.target)
        call = ExerciseCall(tool.name, tuple((arguments[i].name, given[i]) for i in order), asked.told(rng))
        return asked.example(ask(rng, CONVERT, value=asked.value, source=asked.source, target=asked.target), call)

    return Offer(tool, TASK, question, _SUBJECTS, _SUBJECTS)


def unit_table(rng: random.Random) -> Offer:
    """A tool that tells how much one of a unit is in another."""
    source, target = rng.choice(ENDS)
    tool = ExerciseTool(rng.choice(TABLES), rng.choice(TABLE_ABOUT), (Argument(source), Argument(target)))

    def question(rng: random.Random) -> Example:
        asked = _unknown(rng, one=True)
        call = ExerciseCall(tool.name, ((source, asked.source), (target, asked.target)), asked.told(rng))
        return asked.example(ask(rng, ONE, source=asked.source, target=asked.target), call)

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
    (source, sources), (_, targets) = (
        rng.choice(FOREIGN) if rng.random() < 0.5 else (word := pseudo_word(rng), f"{word}s") for _ in range(2)
    )
    value = "1" if one else plain(Decimal(rng.randrange(1, 10 ** rng.choice((1, 2, 3, 4)))) / rng.choice((1, 1, 1, 10)))
    result = plain(Decimal(rng.randrange(1, 10 ** rng.choice((2, 3, 4, 5, 6)))) / 10 ** rng.choice((0, 0, 1, 2, 3)))
    problem = f"convert {value} {source} {targets}"
    return _Asked(value, source if value == "1" else sources, result, targets, problem, is_held_out(problem))
