"""Small look-up tables: the table stands in the prompt and the question asks for one entry of it."""

from __future__ import annotations

import random

from strata.train.tasks.example import Example, Task, worked
from strata.train.tasks.words import FOODS, NAMES, THINGS, texts

TEXTS = texts("tables")
# What a row is of, and what it says of that.
KINDS = (("item", "price"), ("name", "age"), ("name", "city"), ("item", "color"))


def _column(rng: random.Random, name: str, rows: int) -> list[str]:
    if name in ("price", "age"):
        return [str(n) for n in rng.sample(range(2, 100), rows)]
    words = {"name": NAMES, "item": THINGS + FOODS, "city": TEXTS["cities"], "color": TEXTS["colors"]}[name]
    return rng.sample(words, rows)


def _draw(rng: random.Random, header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """The table as a user may type it."""
    style = rng.randrange(5)
    if style == 0:
        return "\n".join(["| " + " | ".join(row) + " |" for row in (header, ("---", "---"), *rows)])
    if style == 1:
        return "\n".join(",".join(row) for row in (header, *rows))
    if style == 2:
        return "\n".join(f"{key}: {value}" for key, value in rows)
    if style == 3:
        return ", ".join(f"{key} {value}" for key, value in rows) + "."
    return "\n".join(" ".join(row) for row in (header, *rows))


def _down_to(rows: list[tuple[str, str]], key: str) -> str:
    """The rows from the first to that of `key`, a line each. Whoever looks for a value reads them in this order: to go
    from a value back to its key at once is what models of this size do not learn."""
    last = [row[0] for row in rows].index(key)
    return "\n".join(f"{key}: {value}" for key, value in rows[: last + 1])


def look_up(rng: random.Random) -> Example:
    """One entry of a two-column table, by its key or by its value, or the row with the extreme number."""
    key_name, value_name = rng.choice(KINDS)
    count = rng.randrange(3, 8)
    rows = list(zip(_column(rng, key_name, count), _column(rng, value_name, count), strict=True))
    key, value = rng.choice(rows)
    draw = rng.random()
    if value_name in ("price", "age") and draw < 0.2:
        largest = rng.random() < 0.5
        key, value = (max if largest else min)(rows, key=lambda row: int(row[1]))
        superlative = {"age": ("oldest", "youngest"), "price": ("most expensive", "cheapest")}[value_name][not largest]
        question = f"{'Who' if value_name == 'age' else 'Which item'} is the {superlative}?"
        steps, answer = f"{value}\n{_down_to(rows, key)}", key
    elif draw < 0.65:
        question = rng.choice(TEXTS[value_name]).format(key=key)
        steps, answer = f"{key}: {value}", value
    else:
        question = rng.choice(TEXTS[f"{value_name}_key"]).format(value=value)
        steps, answer = _down_to(rows, key), key
    table = _draw(rng, (key_name, value_name), rows)
    text = f"{question}\n{table}" if rng.random() < 0.3 else f"{table}\n{question}"
    if rng.random() < 0.3:
        text = f"{rng.choice(TEXTS['leads'])}\n{text}"
    return worked("tables", text, steps, answer, f"table {sorted(rows)} {question}")


TASKS = (Task("tables", 6, look_up),)
