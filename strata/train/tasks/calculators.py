"""Tools that calculate: one for an expression, one for an operation and its operands, one for each operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from strata.train.tasks import arithmetic
from strata.train.tasks.example import Example, ask, is_held_out
from strata.train.tasks.offer import Offer
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.units import plain
from strata.train.tasks.words import listed

TASK = "calling a calculator"


@dataclass(frozen=True)
class Calculation:
    """sign: in replies. typed: in what tools read. words: of tools. own_tasks: those of the model's that ask for it."""

    sign: str
    typed: str
    words: tuple[str, ...]
    phrasings: tuple[str, ...]
    own_tasks: frozenset[str]


# Calculators give no remainders.
_DIVIDE = tuple(one for one in arithmetic.DIVIDE if "remainder" not in one and "go into" not in one)

OPERATIONS = (
    Calculation(
        "+", "+", ("add", "plus", "sum"), arithmetic.ADD, frozenset({"two-digit addition", "longer addition"})
    ),
    Calculation(
        "-", "-", ("subtract", "minus", "difference"), arithmetic.SUBTRACT,
        frozenset({"two-digit subtraction", "longer subtraction"}),
    ),
    Calculation("×", "*", ("multiply", "times", "product"), arithmetic.MULTIPLY, frozenset({"multiplication"})),
    Calculation("÷", "/", ("divide", "divided_by", "quotient"), _DIVIDE, frozenset({"division"})),
)  # fmt: skip

NAMES = listed("calculator calculate calc compute math arithmetic evaluate solve do_math run_calculator")
EXPRESSIONS = listed("expression expression expr formula input calculation query")
OPERATORS = listed("operation operation op operator action kind")
OPERANDS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in listed("a/b a/b x/y first/second left/right number1/number2 num1/num2 value1/value2 p/q m/n")
)
ABOUT = (
    "Calculates.", "A calculator.", "Computes with numbers.", "Performs basic arithmetic.", "Does arithmetic.",
    "Add, subtract, multiply or divide two numbers.", "Get the result of a calculation.", "",
)  # fmt: skip
FORMULA_ABOUT = ("Computes an expression.", "Evaluates a formula.", "Evaluate a math expression.", *ABOUT)
NUMBERS = ("number", "number", "integer")

Value = str | int | float
# The arguments of a call, from the operation and its operands.
Writer = Callable[[Calculation, str, str], list[tuple[str, Value]]]


def calculator(rng: random.Random) -> Offer:
    """A tool for all four operations."""
    return (_of_expression if rng.random() < 0.5 else _of_operands)(rng, rng.choice(NAMES))


def _of_expression(rng: random.Random, name: str) -> Offer:
    argument = rng.choice(EXPRESSIONS)
    tool = ExerciseTool(name, rng.choice(FORMULA_ABOUT), (Argument(argument),))
    return _offer(tool, OPERATIONS, lambda operation, a, b: [(argument, f"{a} {operation.typed} {b}")])


def _of_operands(rng: random.Random, name: str) -> Offer:
    operator, operands, place, word = rng.choice(OPERATORS), rng.choice(OPERANDS), rng.randrange(3), rng.randrange(5)
    choices = {one.sign: one.words[word] if word < 3 else one.typed for one in OPERATIONS}
    kind = rng.choice(NUMBERS)
    arguments = [Argument(one, kind) for one in operands]
    arguments.insert(place, Argument(operator, choices=tuple(choices.values())))

    def write(operation: Calculation, a: str, b: str) -> list[tuple[str, Value]]:
        values: list[tuple[str, Value]] = [(operands[0], _number(a)), (operands[1], _number(b))]
        values.insert(place, (operator, choices[operation.sign]))
        return values

    return _offer(ExerciseTool(name, rng.choice(ABOUT), tuple(arguments)), OPERATIONS, write)


def one_operation(rng: random.Random) -> Offer:
    """A tool for one operation alone."""
    operation, (x, y) = rng.choice(OPERATIONS), rng.choice(OPERANDS)
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
    if sign == "+":
        return arithmetic.addition_problem(x, y), arithmetic.addition_held_out(x, y)
    if sign == "-":
        return arithmetic.subtraction_problem(x, y), arithmetic.subtraction_held_out(x, y)
    if sign == "×":
        problem = arithmetic.multiplication_problem(x, y)
        return problem, is_held_out(problem) if min(x, y) >= 10 else arithmetic.multiplication_held_out(x, y)
    problem = arithmetic.division_problem(x, y)
    return problem, is_held_out(problem) if y >= 10 else arithmetic.division_held_out(x, y)


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
