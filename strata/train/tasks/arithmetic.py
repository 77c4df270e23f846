"""Addition, subtraction, multiplication and division of whole numbers, worked digit by digit.

The steps contain only sums, differences and products with a one-digit operand and quotients below ten; such problems
are never held out, so no held-out problem is solved inside another one's steps.
"""

from __future__ import annotations

import random
from functools import partial

from strata.train.tasks.example import Example, Task, ask, is_held_out, worked
from strata.train.tasks.words import texts

TEXTS = texts("arithmetic")
_NAMES = {"+": "add", "-": "subtract", "×": "multiply"}
PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")


def problem_of(sign: str, a: int, b: int) -> tuple[str, bool]:
    """The canonical form of a + b, a - b, a × b or a ÷ b, which is that of b + a, b - a and b × a too; and whether it
    is held out. What worked steps consist of is not: sums and differences with a one-digit operand, and quotients below
    ten. A product's task has one factor of one digit: products of digits are steps, and those with two larger factors
    shift by ten.
    """
    if sign == "÷":
        problem, is_task = f"divide {a} {b}", b < 10 <= a // b
    else:
        low, high = sorted((a, b))
        problem = f"{_NAMES[sign]} {low} {high}"
        is_task = low < 10 <= high if sign == "×" else low >= 10
    return problem, is_task and is_held_out(problem)


def addition_steps(a: int, b: int) -> str:
    """Column addition from the ones upward; the last column is written whole."""
    places = max(len(str(a)), len(str(b)))
    lines, carry = [], 0
    for place in range(places):
        x, y = a // 10**place % 10, b // 10**place % 10
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        total = x + y + carry
        line = f"{PLACES[place]}: {terms} = {total}"
        carry = 0 if place == places - 1 else total // 10
        line += f", write {total % 10}, carry {carry}" if carry else f", write {total}"
        lines.append(line)
    return "\n".join(lines)


def subtraction_steps(a: int, b: int) -> str:
    """Column subtraction from the ones upward, a >= b, with borrowing."""
    lines, borrowed = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        line = f"{PLACES[place]}: "
        if borrowed:
            line += f"{x} - 1 = {x - 1}, "
            x -= 1
        if x >= y:
            line += f"{x} - {y} = {x - y}"
            borrowed = 0
        else:
            line += f"{x} - {y}, borrow, {x + 10} - {y} = {x + 10 - y}"
            borrowed = 1
        lines.append(line)
    return "\n".join(lines)


def multiplication_steps(a: int, digit: int) -> str:
    """Column multiplication of a number by one digit."""
    text = str(a)
    lines, carry = [], 0
    for place in range(len(text)):
        x = a // 10**place % 10
        total = x * digit
        line = f"{PLACES[place]}: {x} × {digit} = {total}"
        if carry:
            line += f", {total} + {carry} = {total + carry}"
        total += carry
        carry = 0 if place == len(text) - 1 else total // 10
        line += f", write {total % 10}, carry {carry}" if carry else f", write {total}"
        lines.append(line)
    return "\n".join(lines)


def division_steps(a: int, divisor: int) -> str:
    """Long division by one digit."""
    lines, rest = [], 0
    for digit in str(a):
        part = rest * 10 + int(digit)
        rest = part % divisor
        lines.append(f"{part} ÷ {divisor} = {part // divisor} remainder {rest}")
    return "\n".join(lines)


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _lengths(rng: random.Random, digits: int) -> tuple[int, int]:
    """The digits of two operands, both 2 when asked for, else at most `digits` and rarely both below 3."""
    if digits == 2:
        return 2, 2
    first, second = rng.choice(((1, 1), (1, 2), (1, 3), (2, 3), (2, 3), (3, 3), (3, 3), (1, 4), (2, 4), (3, 4), (4, 4)))
    return (first, second) if rng.random() < 0.5 else (second, first)


def _addition(rng: random.Random, task: str, digits: int) -> Example:
    a, b = (_number(rng, length) for length in _lengths(rng, digits))
    return worked(task, ask(rng, TEXTS["add"], a=a, b=b), addition_steps(a, b), str(a + b), *problem_of("+", a, b))


def _subtraction(rng: random.Random, task: str, digits: int) -> Example:
    a, b = (_number(rng, length) for length in _lengths(rng, digits))
    if a < b and rng.random() < 0.85:
        a, b = b, a
    steps = subtraction_steps(max(a, b), min(a, b))
    if a < b:
        steps = f"{a} is less than {b}: {b} - {a} with a minus.\n{steps}"
    return worked(task, ask(rng, TEXTS["subtract"], a=a, b=b), steps, str(a - b), *problem_of("-", a, b))


def multiplication(rng: random.Random) -> Example:
    """Up to three digits times one digit, in either order."""
    a, digit = _number(rng, rng.choice((1, 2, 2, 3))), rng.randrange(2, 10)
    first, second = (a, digit) if rng.random() < 0.75 else (digit, a)
    question = ask(rng, TEXTS["multiply"], a=first, b=second)
    steps = multiplication_steps(a, digit)
    return worked("multiplication", question, steps, str(a * digit), *problem_of("×", a, digit))


def division(rng: random.Random) -> Example:
    """Up to three digits divided by one digit, with remainder."""
    a, divisor = _number(rng, rng.choice((1, 2, 2, 3, 3))), rng.randrange(2, 10)
    quotient, rest = divmod(a, divisor)
    answer = f"{quotient} remainder {rest}" if rest else str(quotient)
    question = ask(rng, TEXTS["divide"], a=a, b=divisor)
    return worked("division", question, division_steps(a, divisor), answer, *problem_of("÷", a, divisor))


TASKS = (
    Task("two-digit addition", 8, partial(_addition, task="two-digit addition", digits=2)),
    Task("longer addition", 7, partial(_addition, task="longer addition", digits=4)),
    Task("two-digit subtraction", 8, partial(_subtraction, task="two-digit subtraction", digits=2)),
    Task("longer subtraction", 7, partial(_subtraction, task="longer subtraction", digits=4)),
    Task("multiplication", 6, multiplication),
    Task("division", 6, division),
)
