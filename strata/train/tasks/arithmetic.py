"""Addition, subtraction, multiplication and division of whole numbers, worked digit by digit.

The steps contain only sums, differences and products with a one-digit operand and quotients below ten; such problems
are never held out, so no held-out problem is solved inside another one's steps.
"""

from __future__ import annotations

import random
from functools import partial

from strata.train.tasks.example import Example, Task, ask, is_held_out

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")

ADD = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "{a} plus {b}",
    "Add {a} and {b}.",
    "Add {b} to {a}.",
    "Add the numbers {a} and {b}.",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "Compute the sum of {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "What do you get when you add {a} and {b}?",
    "Work out {a} + {b}.",
    "Solve {a} + {b}.",
    "Can you add {a} and {b}?",
    "Tell me {a} + {b}.",
    "Sum {a} and {b}.",
    "I have {a} and get {b} more. How many do I have?",
)
SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "What's {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "{a}-{b}=?",
    "{a} minus {b}",
    "Subtract {b} from {a}.",
    "Take {b} away from {a}.",
    "Take {b} from {a}.",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}.",
    "What is the difference of {a} and {b}?",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "Work out {a} - {b}.",
    "Solve {a} - {b}.",
    "What is left of {a} after taking away {b}?",
    "Can you subtract {b} from {a}?",
    "Tell me {a} - {b}.",
)
MULTIPLY = (
    "What is {a} × {b}?",
    "What is {a} x {b}?",
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "What's {a} times {b}?",
    "{a} × {b}",
    "{a} * {b}",
    "{a}*{b}",
    "{a} x {b} =",
    "{a} times {b}",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "Calculate {a} × {b}.",
    "Compute {a} * {b}.",
    "What is the product of {a} and {b}?",
    "How much is {a} times {b}?",
    "Work out {a} × {b}.",
)
DIVIDE = (
    "What is {a} ÷ {b}?",
    "What is {a} / {b}?",
    "What is {a} divided by {b}?",
    "What's {a} divided by {b}?",
    "{a} ÷ {b}",
    "{a} / {b}",
    "{a}/{b}",
    "{a} divided by {b}",
    "Divide {a} by {b}.",
    "Divide {a} by {b} with remainder.",
    "Calculate {a} ÷ {b}.",
    "Compute {a} / {b}.",
    "What is {a} divided by {b}, with remainder?",
    "How many times does {b} go into {a}?",
    "Work out {a} ÷ {b}.",
)


def addition_problem(a: int, b: int) -> str:
    """The canonical form: the order of the operands does not matter."""
    return f"add {min(a, b)} {max(a, b)}"


def addition_held_out(a: int, b: int) -> bool:
    return min(a, b) >= 10 and is_held_out(addition_problem(a, b))


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
        if carry:
            line += f", write {total % 10}, carry {carry}"
        else:
            line += f", write {total}"
        lines.append(line)
    return "\n".join(lines)


def subtraction_problem(a: int, b: int) -> str:
    """The canonical form: a - b and b - a are the same problem."""
    return f"subtract {min(a, b)} {max(a, b)}"


def subtraction_held_out(a: int, b: int) -> bool:
    return min(a, b) >= 10 and is_held_out(subtraction_problem(a, b))


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


def multiplication_problem(a: int, b: int) -> str:
    return f"multiply {min(a, b)} {max(a, b)}"


def multiplication_held_out(a: int, b: int) -> bool:
    """The task has a one-digit factor; products of two digits are steps, and those with larger factors shift by ten."""
    return min(a, b) < 10 <= max(a, b) and is_held_out(multiplication_problem(a, b))


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


def division_problem(a: int, divisor: int) -> str:
    return f"divide {a} {divisor}"


def division_held_out(a: int, divisor: int) -> bool:
    """Divisors have one digit. Quotients below ten are steps of long division and never held out."""
    return divisor < 10 <= a // divisor and is_held_out(division_problem(a, divisor))


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
    first, second = _lengths(rng, digits)
    a, b = _number(rng, first), _number(rng, second)
    answer = str(a + b)
    reply = f"{addition_steps(a, b)}\nAnswer: {answer}"
    return Example(task, ask(rng, ADD, a=a, b=b), reply, answer, addition_problem(a, b), addition_held_out(a, b))


def _subtraction(rng: random.Random, task: str, digits: int) -> Example:
    first, second = _lengths(rng, digits)
    a, b = _number(rng, first), _number(rng, second)
    if a < b and rng.random() < 0.85:
        a, b = b, a
    answer = str(a - b)
    reply = f"{subtraction_steps(a, b)}\nAnswer: {answer}"
    if a < b:
        reply = f"{a} is less than {b}: {b} - {a} with a minus.\n{subtraction_steps(b, a)}\nAnswer: {answer}"
    question = ask(rng, SUBTRACT, a=a, b=b)
    return Example(task, question, reply, answer, subtraction_problem(a, b), subtraction_held_out(a, b))


def multiplication(rng: random.Random) -> Example:
    """Up to three digits times one digit, in either order."""
    a, digit = _number(rng, rng.choice((1, 2, 2, 3))), rng.randrange(2, 10)
    answer = str(a * digit)
    reply = f"{multiplication_steps(a, digit)}\nAnswer: {answer}"
    first, second = (a, digit) if rng.random() < 0.75 else (digit, a)
    problem, held_out = multiplication_problem(a, digit), multiplication_held_out(a, digit)
    return Example("multiplication", ask(rng, MULTIPLY, a=first, b=second), reply, answer, problem, held_out)


def division(rng: random.Random) -> Example:
    """Up to three digits divided by one digit, with remainder."""
    a, divisor = _number(rng, rng.choice((1, 2, 2, 3, 3))), rng.randrange(2, 10)
    quotient, rest = divmod(a, divisor)
    answer = f"{quotient} remainder {rest}" if rest else str(quotient)
    reply = f"{division_steps(a, divisor)}\nAnswer: {answer}"
    problem, held_out = division_problem(a, divisor), division_held_out(a, divisor)
    return Example("division", ask(rng, DIVIDE, a=a, b=divisor), reply, answer, problem, held_out)


TASKS = (
    Task("two-digit addition", 8, partial(_addition, task="two-digit addition", digits=2)),
    Task("longer addition", 7, partial(_addition, task="longer addition", digits=4)),
    Task("two-digit subtraction", 8, partial(_subtraction, task="two-digit subtraction", digits=2)),
    Task("longer subtraction", 7, partial(_subtraction, task="longer subtraction", digits=4)),
    Task("multiplication", 6, multiplication),
    Task("division", 6, division),
)
