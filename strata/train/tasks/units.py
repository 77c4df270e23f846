"""Unit conversion: powers of ten by moving the decimal point, other factors by worked multiplication or division."""

from __future__ import annotations

import random
from dataclasses import dataclass
from decimal import Decimal

from strata.train.tasks.arithmetic import division_steps, multiplication_steps, problem_of
from strata.train.tasks.example import Example, Task, ask, is_held_out, worked
from strata.train.tasks.words import texts


@dataclass(frozen=True)
class Unit:
    symbol: str
    singular: str
    plural: str


@dataclass(frozen=True)
class Pair:
    """One `large` is `factor` `small`."""

    large: Unit
    small: Unit
    factor: int


TEXTS = texts("units")
UNITS = {unit.symbol: unit for unit in (Unit(*text.split("/")) for text in TEXTS["units"])}
DECIMAL, WHOLE = (
    [Pair(UNITS[large], UNITS[small], int(factor)) for large, factor, small in (one.split("/") for one in TEXTS[kind])]
    for kind in ("decimal", "whole")
)
SPELLINGS = {"metre": "meter", "litre": "liter"}


def plain(value: Decimal) -> str:
    """The number without exponent or trailing zeros: 3.50 is "3.5", 3E+3 is "3000"."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def measured(value: str, unit: Unit) -> str:
    """The quantity as replies write it: "3000 m", "1 week"."""
    return f"{value} {unit.singular if value == '1' and unit.symbol == unit.plural else unit.symbol}"


def _named(rng: random.Random, unit: Unit, one: bool) -> str:
    """The unit as a user may write it."""
    name = rng.choice((unit.symbol, unit.plural, unit.plural))
    if one and name == unit.plural:
        name = unit.singular
    if rng.random() < 0.4:
        for british, american in SPELLINGS.items():
            name = name.replace(british, american)
    return name


@dataclass(frozen=True)
class Conversion:
    """`value` of `source` is `result` of `target`, by `steps`. `steps_held_out`: the arithmetic in them is."""

    value: str
    source: Unit
    result: str
    target: Unit
    steps: str
    steps_held_out: bool = False

    @property
    def problem(self) -> str:
        return f"convert {self.value} {self.source.singular} {self.target.singular}"

    @property
    def held_out(self) -> bool:
        return self.steps_held_out or is_held_out(self.problem)


def _rule(pair: Pair) -> str:
    return f"{measured('1', pair.large)} = {pair.factor} {pair.small.symbol}"


def _moves(value: Decimal, places: int, *, right: bool) -> str:
    """The number while its point moves, one place at a time: "3.5, 35, 350"."""
    return ", ".join(plain(value.scaleb(move if right else -move)) for move in range(places + 1))


def _multiples(factor: int, count: int) -> str:
    """Counting up to count * factor: "24 1, 48 2, 72 3"."""
    return ", ".join(f"{factor * i} {i}" for i in range(1, count + 1))


def _decimal(rng: random.Random) -> Conversion:
    pair = rng.choice(DECIMAL)
    places = len(str(pair.factor)) - 1
    if rng.random() < 0.55:
        value = Decimal(rng.randrange(1, rng.choice((10, 100, 1000))))
        if rng.random() < 0.3:
            value /= 10
        steps = f"{_rule(pair)}, move the point {places} right\n{_moves(value, places, right=True)}"
        return Conversion(plain(value), pair.large, plain(value * pair.factor), pair.small, steps)
    value = Decimal(rng.randrange(1, rng.choice((10, 100, 1000, 10000))))
    if rng.random() < 0.5:
        value = Decimal(rng.randrange(1, 100) * pair.factor)
    steps = f"{_rule(pair)}, move the point {places} left\n{_moves(value, places, right=False)}"
    return Conversion(plain(value), pair.small, plain(value / pair.factor), pair.large, steps)


def _whole(rng: random.Random) -> Conversion:
    """By the factor's one digit (for 60, its tens digit), or by the count's one digit when the factor has two."""
    pair = rng.choice(WHOLE)
    digit = pair.factor // 10 if pair.factor == 60 else pair.factor
    count = rng.randrange(1, 100) if digit < 10 else rng.randrange(1, 10)
    total = count * pair.factor
    if rng.random() < 0.6:
        steps = multiplication_steps(count, digit) if digit < 10 else multiplication_steps(digit, count)
        if pair.factor == 60:
            steps = f"{count} × 60 = {count} × 6 × 10\n{steps}\n{count * 6} × 10 = {total}"
        _, held_out = problem_of("×", count, digit)
        return Conversion(str(count), pair.large, str(total), pair.small, f"{_rule(pair)}\n{steps}", held_out)
    rest = total // 10 if pair.factor == 60 else total
    steps = division_steps(rest, digit) if digit < 10 else _multiples(pair.factor, count)
    if pair.factor == 60:
        steps = f"{total} ÷ 60 = {rest} ÷ 6\n{steps}"
    _, held_out = problem_of("÷", rest, digit)
    return Conversion(str(total), pair.small, str(count), pair.large, f"{_rule(pair)}\n{steps}", held_out)


def any_conversion(rng: random.Random) -> Conversion:
    """A quantity in another unit of the same kind."""
    return (_decimal if rng.random() < 0.65 else _whole)(rng)


def named_units(rng: random.Random, made: Conversion) -> tuple[str, str]:
    """Source and target as a user may write them."""
    return _named(rng, made.source, made.value == "1"), _named(rng, made.target, one=False)


def conversion(rng: random.Random) -> Example:
    """The question for a conversion, and its steps."""
    made = any_conversion(rng)
    source, target = named_units(rng, made)
    question = ask(rng, TEXTS["convert"], value=made.value, source=source, target=target)
    answer = measured(made.result, made.target)
    return worked("unit conversion", question, made.steps, answer, made.problem, made.held_out)


TASKS = (Task("unit conversion", 10, conversion),)
