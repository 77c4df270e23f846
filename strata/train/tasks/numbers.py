"""Comparing numbers, finding the largest or smallest of a list, and sorting by repeated selection."""

from __future__ import annotations

import random
from functools import partial

from strata.train.tasks.arithmetic import PLACES
from strata.train.tasks.example import Example, Task, ask, is_held_out

LARGER = (
    "Which is larger, {a} or {b}?",
    "Which number is larger: {a} or {b}?",
    "Which is bigger, {a} or {b}?",
    "Which number is greater, {a} or {b}?",
    "What is more, {a} or {b}?",
    "Compare {a} and {b}. Which is larger?",
    "Is {a} or {b} the larger number?",
    "Tell me the larger of {a} and {b}.",
    "What is the larger of {a} and {b}?",
)
SMALLER = (
    "Which is smaller, {a} or {b}?",
    "Which number is smaller: {a} or {b}?",
    "Which is less, {a} or {b}?",
    "Which number is lower, {a} or {b}?",
    "Compare {a} and {b}. Which is smaller?",
    "Is {a} or {b} the smaller number?",
    "Tell me the smaller of {a} and {b}.",
    "What is the smaller of {a} and {b}?",
)
ASCENDING = (
    "Sort these numbers: {numbers}",
    "Sort these numbers: {numbers}.",
    "Sort the numbers {numbers}.",
    "Sort {numbers}",
    "Sort: {numbers}",
    "Please sort {numbers}.",
    "Sort these numbers from smallest to largest: {numbers}",
    "Sort from smallest to largest: {numbers}",
    "Sort in ascending order: {numbers}",
    "Arrange these numbers in ascending order: {numbers}",
    "Put these numbers in order: {numbers}",
    "Put {numbers} in order.",
    "Order these numbers from low to high: {numbers}",
    "Can you sort {numbers}?",
    "What is the sorted order of {numbers}?",
    "Sort this list: [{numbers}]",
)
DESCENDING = (
    "Sort these numbers from largest to smallest: {numbers}",
    "Sort from largest to smallest: {numbers}",
    "Sort in descending order: {numbers}",
    "Arrange these numbers in descending order: {numbers}",
    "Order these numbers from high to low: {numbers}",
    "Sort {numbers} in descending order.",
    "Sort {numbers} from largest to smallest.",
)
LARGEST = (
    "What is the largest of {numbers}?",
    "What is the largest number in {numbers}?",
    "Which of these numbers is the largest: {numbers}?",
    "Find the largest number: {numbers}",
    "Find the maximum of {numbers}.",
    "What is the maximum of {numbers}?",
    "Which is the biggest: {numbers}?",
)
SMALLEST = (
    "What is the smallest of {numbers}?",
    "What is the smallest number in {numbers}?",
    "Which of these numbers is the smallest: {numbers}?",
    "Find the smallest number: {numbers}",
    "Find the minimum of {numbers}.",
    "What is the minimum of {numbers}?",
    "Which is the lowest: {numbers}?",
)


def comparison_steps(a: int, b: int) -> str:
    """The first difference of two different numbers: in length, else in a digit."""
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{a} has {len(x)} digits, {b} has {len(y)}".replace(" 1 digits", " 1 digit")
    place = next(i for i in range(len(x)) if x[i] != y[i])
    sign = "<" if x[place] < y[place] else ">"
    return f"{PLACES[len(x) - 1 - place]}: {x[place]} {sign} {y[place]}"


def selection_steps(numbers: list[int], word: str) -> str:
    """Repeated selection: each line names the next number and lists what is left."""
    left, lines = list(numbers), []
    while len(left) > 1:
        chosen = min(left) if word == "smallest" else max(left)
        left.remove(chosen)
        lines.append(f"{word} {chosen}, left {' '.join(map(str, left))}")
    lines.append(f"last {left[0]}")
    return "\n".join(lines)


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 2, 3, 3, 4)))


def comparison(rng: random.Random) -> Example:
    """The larger or smaller of two different numbers, often of the same length."""
    a = _number(rng)
    b = rng.randrange(10 ** len(str(a))) if rng.random() < 0.6 else _number(rng)
    if a == b:
        b = a + 1
    larger = rng.random() < 0.5
    answer = str(max(a, b) if larger else min(a, b))
    reply = f"{comparison_steps(a, b)}\nAnswer: {answer}"
    problem = f"compare {min(a, b)} {max(a, b)}"
    question = ask(rng, LARGER if larger else SMALLER, a=a, b=b)
    return Example("comparison", question, reply, answer, problem, is_held_out(problem))


def _list(rng: random.Random, count: int) -> tuple[list[int], str]:
    top = rng.choice((10, 100, 100, 100, 100, 1000))
    if count > top // 2:
        top = 100
    numbers = [rng.randrange(top) for _ in range(count)]
    separator = rng.choice((", ", ", ", ", ", " ", ","))
    return numbers, separator.join(map(str, numbers))


def extreme(rng: random.Random) -> Example:
    """The largest or smallest of three to seven numbers."""
    numbers, text = _list(rng, rng.randrange(3, 8))
    largest = rng.random() < 0.5
    answer = str(max(numbers) if largest else min(numbers))
    question = ask(rng, LARGEST if largest else SMALLEST, numbers=text)
    problem = f"extreme {sorted(numbers)}"
    return Example("largest or smallest", question, f"Answer: {answer}", answer, problem, is_held_out(problem))


def _sorting(rng: random.Random, task: str, counts: tuple[int, ...]) -> Example:
    numbers, text = _list(rng, rng.choice(counts))
    descending = rng.random() < 0.3
    answer = " ".join(map(str, sorted(numbers, reverse=descending)))
    reply = f"{selection_steps(numbers, 'largest' if descending else 'smallest')}\nAnswer: {answer}"
    question = ask(rng, DESCENDING if descending else ASCENDING, numbers=text)
    problem = f"sort {sorted(numbers)}"
    return Example(task, question, reply, answer, problem, is_held_out(problem))


TASKS = (
    Task("comparison", 4, comparison),
    Task("largest or smallest", 3, extreme),
    Task("sorting five numbers", 6, partial(_sorting, task="sorting five numbers", counts=(5,))),
    Task("sorting", 4, partial(_sorting, task="sorting", counts=(2, 3, 4, 6, 7))),
)
