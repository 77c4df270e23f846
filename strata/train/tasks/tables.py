"""Small look-up tables: the table stands in the prompt and the question asks for one entry of it."""

from __future__ import annotations

import random

from strata.train.tasks.example import Example, Task, is_held_out
from strata.train.tasks.words import FOODS, NAMES, THINGS, listed

CITIES = listed(
    "Athens Berlin Boston Cairo Delhi Dublin Geneva Hanoi Kyoto Lagos Lima Lisbon London Madrid Miami Moscow Nairobi "
    "Oslo Paris Prague Quito Rome Seoul Sydney Tokyo Toronto Vienna Warsaw"
)
COLORS = listed("black blue brown gray green orange pink purple red white yellow")

PRICE = ("What does the {key} cost?", "How much is the {key}?", "What is the price of the {key}?", "Price of {key}?")
PRICE_KEY = ("Which item costs {value}?", "What can I buy for {value}?", "Which item has the price {value}?")
AGE = ("How old is {key}?", "What is the age of {key}?", "What age is {key}?")
AGE_KEY = ("Who is {value} years old?", "Who is {value}?", "Which person is {value} years old?")
CITY = ("Where does {key} live?", "In which city does {key} live?", "What is the city of {key}?")
CITY_KEY = ("Who lives in {value}?", "Who is from {value}?", "Which person lives in {value}?")
COLOR = ("What is the color of the {key}?", "What color is the {key}?", "Which color does the {key} have?")
COLOR_KEY = ("Which item is {value}?", "What is {value}?", "Which thing has the color {value}?")

KINDS = (
    ("item", "price", PRICE, PRICE_KEY),
    ("name", "age", AGE, AGE_KEY),
    ("name", "city", CITY, CITY_KEY),
    ("item", "color", COLOR, COLOR_KEY),
)


def _column(rng: random.Random, name: str, rows: int) -> list[str]:
    if name in ("price", "age"):
        return [str(n) for n in rng.sample(range(2, 100), rows)]
    words = {"name": NAMES, "item": THINGS + FOODS, "city": CITIES, "color": COLORS}[name]
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
    key_name, value_name, by_key, by_value = rng.choice(KINDS)
    count = rng.randrange(3, 8)
    rows = list(zip(_column(rng, key_name, count), _column(rng, value_name, count), strict=True))
    key, value = rng.choice(rows)
    draw = rng.random()
    if value_name in ("price", "age") and draw < 0.2:
        largest = rng.random() < 0.5
        key, value = (max if largest else min)(rows, key=lambda row: int(row[1]))
        superlative = {"age": ("oldest", "youngest"), "price": ("most expensive", "cheapest")}[value_name][not largest]
        question = f"{'Who' if value_name == 'age' else 'Which item'} is the {superlative}?"
        reply, answer = f"{value}\n{_down_to(rows, key)}\nAnswer: {key}", key
    elif draw < 0.65:
        question = rng.choice(by_key).format(key=key)
        reply, answer = f"{key}: {value}\nAnswer: {value}", value
    else:
        question = rng.choice(by_value).format(value=value)
        reply, answer = f"{_down_to(rows, key)}\nAnswer: {key}", key
    table = _draw(rng, (key_name, value_name), rows)
    text = f"{question}\n{table}" if rng.random() < 0.3 else f"{table}\n{question}"
    if rng.random() < 0.3:
        text = (
            rng.choice(("Here is a table.\n", "Look at this table:\n", "Use the table.\n", "Given this list:\n")) + text
        )
    problem = f"table {sorted(rows)} {question}"
    return Example("tables", text, reply, answer, problem, is_held_out(problem))


TASKS = (Task("tables", 6, look_up),)
