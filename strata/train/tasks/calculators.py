"""Tools that calculate: one for an expression, one for an operation and its operands, one for each operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from strata.train.tasks import arithmetic
from strata.train.tasks.example import Example, Offer, ask, is_held_out
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.units import plain
from strata.train.tasks.words import texts

TASK = "calling a calculator"


@dataclass(frozen=True)
class Calculation:
    """sign: in replies. typed: in what tools read. words: of tools. own_tasks: those of the model's that ask for it."""

    sign: str
    typed: str
    words: tuple[str, ...]
    phrasings: list[str]
    own_tasks: frozenset[str]


TEXTS = texts("calculators")
_SAID = arithmetic.TEXTS
# Calculators give no remainders.
_DIVIDE = [one for one in _SAID["divide"] if "remainder" not in one and "go into" not in one]
_SUM, _DIFFERENCE = (frozenset({f"two-digit {name}", f"longer {name}"}) for name in ("addition", "subtraction"))
OPERATIONS = (
    Calculation("+", "+", ("add", "plus", "sum"), _SAID["add"], _SUM),
    Calculation("-", "-", ("subtract", "minus", "difference"), _SAID["subtract"], _DIFFERENCE),
    Calculation("×", "*", ("multiply", "times", "product"), _SAID["multiply"], frozenset({"multiplication"})),
    Calculation("÷", "/", ("divide", "divided_by", "quotient"), _DIVIDE, frozenset({"division"})),
)
NUMBERS = ("number", "number", "integer")

Value = str | int | float
# The arguments of a call, from the operation and its operands.
Writer = Callable[[Calculation, str, str], list[tuple[str, Value]]]


def calculator(rng: random.Random) -> Offer:
    """A tool for all four operations."""
    return (_of_expression if rng.random() < 0.5 else _of_operands)(rng, rng.choice(TEXTS["names"]))


def _of_expression(rng: random.Random, name: str) -> Offer:
    argument = rng.choice(TEXTS["expressions"])
    tool = ExerciseTool(name, rng.choice([*TEXTS["formula_about"], *TEXTS["about"]]), (Argument(argument),))
    return _offer(tool, OPERATIONS, lambda operation, a, b: [(argument, f"{a} {operation.typed} {b}")])


def _of_operands(rng: random.Random, name: str) -> Offer:
    operator, operands, place, word = rng.choice(TEXTS["operators"]), _operands(rng), rng.randrange(3), rng.randrange(5)
    choices = {one.sign: one.words[word] if word < 3 else one.typed for one in OPERATIONS}
    kind = rng.choice(NUMBERS)
    arguments = [Argument(one, kind) for one in operands]
    arguments.insert(place, Argument(operator, choices=tuple(choices.values())))

    def write(operation: Calculation, a: str, b: str) -> list[tuple[str, Value]]:
        values: list[tuple[str, Value]] = [(operands[0], _number(a)), (operands[1], _number(b))]
        values.insert(place, (operator, choices[operation.sign]))
        return values

    return _offer(ExerciseTool(name, rng.choice(TEXTS["about"]), tuple(arguments)), OPERATIONS, write)


def one_operation(rng: random.Random) -> Offer:
    """A tool for one operation alone."""
    operation, (x, y) = rng.choice(OPERATIONS), _operands(rng)
    name = rng.choice(("{}", "{}", "{}_numbers", "math_{}", "do_{}")).format(rng.choice(operation.words))
    about = rng.choice((f"Computes {x} {operation.typed} {y}.", f"The {operation.words[2]} of two numbers.", ""))
    kind = rng.choice(NUMBERS)
    tool = ExerciseTool(name, about, (Argument(x, kind), Argument(y, kind)))
    return _offer(tool, (operation,), lambda _, a, b: [(x, _number(a)), (y, _number(b))])


def _offer(tool: ExerciseTool, operations: tuple[Calculation, ...], write: Writer) -> Offer:
    def question(rng: random.Random) -> Example:
        return _calculation(rng, tool, rng.choice(operations), write)

    own_tasks = frozenset(task for one in operations for task in one.own_tasks)
    return Offer(tool, TASK, question, own_tasks, own_tasks)


def _calculation(rng: random.Random, tool: ExerciseTool, operation: Calculation, write: Writer) -> Example:
    whole = any(one.type == "integer" for one in tool.arguments)
    a, b = _operand(rng, whole), _operand(rng, whole)
    if operation.sign == "÷" and Decimal(b) == 0:
        b = "7"
    if operation.sign == "-" and Decimal(a) < Decimal(b) and rng.random() < 0.85:
        a, b = b, a
    answer = plain(_compute(operation.sign, Decimal(a), Decimal(b)))
    shown = f"{a} {operation.sign} {b} = {answer}"
    key = rng.choice(("result", "result", "value", "answer", "output"))
    result = rng.choice((answer, answer, f'{{"{key}": {answer}}}', f'{{"{key}": {answer}}}', shown))
    problem, held_out = _problem(operation.sign, a, b)
    question = ask(rng, operation.phrasings, a=a, b=b)
    call = ExerciseCall(tool.name, tuple(write(operation, a, b)), result)
    return Example(TASK, question, f"{shown}\nAnswer: {answer}", answer, problem, held_out, call=call)


def _operand(rng: random.Random, whole: bool) -> str:
    """A number, as often as not one with which the model cannot calculate on its own."""
    draw = rng.random()
    if draw < 0.5:
        return str(rng.randrange(10 ** rng.choice((1, 2, 2, 3))))
    if whole or draw < 0.85:
        return str(rng.randrange(10 ** rng.choice((4, 5, 6, 7))))
    return plain(Decimal(rng.randrange(1, 10**5)) / 10 ** rng.choice((1, 2)))


def _compute(sign: str, a: Decimal, b: Decimal) -> Decimal:
    """Quotients to six places."""
    return {"+": a + b, "-": a - b, "×": a * b}[sign] if sign != "÷" else round(a / b, 6)


def _problem(sign: str, a: str, b: str) -> tuple[str, bool]:
    """The problem, named as where the model calculates itself, and whether it is held out, here as there."""
    if "." in a + b:
        problem = f"calculate {a} {sign} {b}"
        return problem, is_held_out(problem)
    x, y = int(a), int(b)
    problem, held_out = arithmetic.problem_of(sign, x, y)
    if (sign == "×" and min(x, y) >= 10) or (sign == "÷" and y >= 10):
        held_out = is_held_out(problem)  # which is no task of the model's own
    return problem, held_out


def _operands(rng: random.Random) -> list[str]:
    """What a tool calls both."""
    names: str = rng.choice(TEXTS["operands"])
    return names.split("/")


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
