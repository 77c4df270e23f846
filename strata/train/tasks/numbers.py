"""Comparing numbers, finding the largest or smallest of a list, and sorting by repeated selection."""

from __future__ import annotations

import random
from functools import partial

from strata.train.tasks.arithmetic import PLACES
from strata.train.tasks.example import Example, Task, ask, worked
from strata.train.tasks.words import texts

TEXTS = texts("numbers")


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
    question = ask(rng, TEXTS["larger" if larger else "smaller"], a=a, b=b)
    return worked("comparison", question, comparison_steps(a, b), answer, f"compare {min(a, b)} {max(a, b)}")


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
    question = ask(rng, TEXTS["largest" if largest else "smallest"], numbers=text)
    return worked("largest or smallest", question, "", answer, f"extreme {sorted(numbers)}")


def _sorting(rng: random.Random, task: str, counts: tuple[int, ...]) -> Example:
    numbers, text = _list(rng, rng.choice(counts))
    descending = rng.random() < 0.3
    answer = " ".join(map(str, sorted(numbers, reverse=descending)))
    steps = selection_steps(numbers, "largest" if descending else "smallest")
    question = ask(rng, TEXTS["descending" if descending else "ascending"], numbers=text)
    return worked(task, question, steps, answer, f"sort {sorted(numbers)}")


TASKS = (
    Task("comparison", 4, comparison),
    Task("largest or smallest", 3, extreme),
    Task("sorting five numbers", 6, partial(_sorting, task="sorting five numbers", counts=(5,))),
    Task("sorting", 4, partial(_sorting, task="sorting", counts=(2, 3, 4, 6, 7))),
)
