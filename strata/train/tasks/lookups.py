"""Tools that tell a property of something: its price, its weather, or a word that the model has never seen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from strata.train.tasks import tables
from strata.train.tasks.example import Example, ask, is_held_out
from strata.train.tasks.offer import Offer
from strata.train.tasks.smalltalk import COUNTRIES
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, PLACES_WORDS, THINGS, listed, pseudo_word

TASK = "calling a look-up"
NOTHING = "Nothing was found.\nAnswer: unknown"


@dataclass(frozen=True)
class Property:
    """name: as tools call it. of: what tools call the thing that has it. draw: a value. topics: see `Offer`."""

    name: str
    of: tuple[str, ...]
    keys: tuple[str, ...]
    phrasings: tuple[str, ...]
    draw: Callable[[random.Random], str | int | float]
    topics: frozenset[str] = frozenset()


def _number(below: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(1, below)


def _price(rng: random.Random) -> float | int:
    return rng.randrange(1, 500) if rng.random() < 0.5 else rng.randrange(1, 10_000) / 100


def _weather(rng: random.Random) -> str:
    sky = rng.choice(listed("sunny cloudy rainy windy foggy snowy stormy clear hot cold mild dry"))
    return rng.choice((sky, f"{sky}, {rng.randrange(-15, 40)} degrees", f"{rng.randrange(-15, 40)} degrees and {sky}"))


def _phone(rng: random.Random) -> str:
    return f"{rng.randrange(100, 1000)} {rng.randrange(1000, 10000)}"


ITEM, PERSON, CITY = ("item", "product", "thing", "name"), ("name", "person", "who"), ("city", "location", "place")

PROPERTIES = (
    Property("price", ITEM, (*THINGS, *FOODS), tables.PRICE, _price),
    Property("age", PERSON, tuple(NAMES), tables.AGE, _number(100)),
    Property("city", PERSON, tuple(NAMES), tables.CITY, lambda rng: rng.choice(tables.CITIES)),
    Property("color", ITEM, tuple(THINGS), tables.COLOR, lambda rng: rng.choice(tables.COLORS)),
    Property(
        "weather", CITY, tuple(tables.CITIES),
        ("What is the weather in {key}?", "What is the weather in {key} today?", "How is the weather in {key}?",
         "What's the weather like in {key}?", "Weather in {key}?", "Tell me the weather in {key}."),
        _weather, frozenset({"weather"}),
    ),
    Property(
        "temperature", CITY, tuple(tables.CITIES),
        ("What is the temperature in {key}?", "How warm is it in {key}?", "How cold is it in {key} today?",
         "Temperature in {key}?"),
        lambda rng: rng.randrange(-20, 45), frozenset({"weather"}),
    ),
    Property(
        "population", CITY, tuple(tables.CITIES),
        ("How many people live in {key}?", "What is the population of {key}?", "Population of {key}?"),
        _number(10**7), frozenset({"people live"}),
    ),
    Property(
        "capital", ("country", "state", "name"), tuple(COUNTRIES),
        ("What is the capital of {key}?", "Capital of {key}?", "Tell me the capital of {key}."),
        lambda rng: rng.choice(tables.CITIES), frozenset({"capital"}),
    ),
    Property(
        "time", CITY, tuple(tables.CITIES),
        ("What time is it in {key}?", "What is the time in {key}?", "Time in {key}?"),
        lambda rng: f"{rng.randrange(24):02}:{rng.randrange(60):02}", frozenset({"time is it"}),
    ),
    Property(
        "phone", PERSON, tuple(NAMES),
        ("What is the phone number of {key}?", "How can I call {key}?", "Phone number of {key}?"), _phone,
    ),
    Property(
        "stock", ITEM, (*THINGS, *FOODS),
        ("How many of the {key} are in stock?", "What is the stock of the {key}?", "How much {key} is in stock?"),
        _number(1000),
    ),
    Property(
        "owner", ITEM, tuple(THINGS),
        ("Who owns the {key}?", "Who is the owner of the {key}?", "Whose is the {key}?"), lambda rng: rng.choice(NAMES),
    ),
)  # fmt: skip
SAID = ("What is the {name} of the {key}?", "What {name} does the {key} have?", "Tell me the {name} of the {key}.",
        "Which {name} has the {key}?", "{name} of the {key}?", "Look up the {name} of the {key}.")  # fmt: skip

VERBS = listed("get get get find look_up lookup fetch read show tell query")
CALLED = ("{verb}_{name}", "{verb}_{name}", "{verb}_{name}", "{name}", "{name}_of", "{of}_{name}", "{any}")
ABOUT = (
    "The {name} of a {of}.", "Returns the {name} of a {of}.", "Tells the {name}.", "Looks up the {name}.",
    "Get the {name} of a given {of}.", "Get the current {name} for a {of}.", "Use this to find the {name}.",
)  # fmt: skip
GENERAL = listed("look_up lookup search query database find get_field get_property ask_table")
FIELDS = listed("field field property column attribute what")
UNITS = ("celsius", "fahrenheit")
LOST = ("not found", '{"error": "not found"}', "null", "unknown", "no entry", "error: no such entry")


def look_up(rng: random.Random) -> Offer:
    """A tool for one property."""
    known = rng.choice(PROPERTIES) if rng.random() < 0.7 else _made_up(rng)
    of = rng.choice(known.of)
    name = rng.choice(CALLED).format(verb=rng.choice(VERBS), name=known.name, of=of, any=pseudo_word(rng))
    about = rng.choice(ABOUT).format(name=known.name, of=of)
    if known.name in name and rng.random() < 0.3:
        about = ""
    in_unit = known.name in ("weather", "temperature") and rng.random() < 0.5
    unit = (Argument(rng.choice(("unit", "units", "scale")), choices=UNITS, optional=True),) if in_unit else ()
    tool = ExerciseTool(name, about, (Argument(of), *unit))

    def question(rng: random.Random) -> Example:
        key = _key(rng, known)
        asked = ask(rng, known.phrasings, key=key, name=known.name)
        arguments = [(of, key)]
        if unit and rng.random() < 0.5:
            chosen = rng.choice(UNITS)
            asked = f"{asked.rstrip('?. ')} in {chosen.capitalize()}?"
            arguments.append((unit[0].name, chosen))
        return _example(rng, ExerciseCall(tool.name, tuple(arguments), ""), known, of, key, asked)

    return Offer(tool, TASK, question, frozenset({known.name}), frozenset({"tables"}), known.topics)


def table(rng: random.Random) -> Offer:
    """A tool for several properties of the things of one kind, which it is told by name."""
    words = [known.name for known in rng.sample(PROPERTIES, 2)] + [pseudo_word(rng)]
    kind = _made_up(rng)
    fields = tuple(rng.sample(words, rng.randrange(2, 4)))
    of, field = rng.choice(ITEM), rng.choice(FIELDS)
    tool = ExerciseTool(
        rng.choice(GENERAL),
        rng.choice(("Looks up a table.", f"What is known of a {of}.", "Reads the database.", "")),
        (Argument(of), Argument(field, choices=fields)),
    )

    def question(rng: random.Random) -> Example:
        known = Property(rng.choice(fields), ITEM, kind.keys, SAID, kind.draw)
        key = _key(rng, known)
        asked = ask(rng, SAID, name=known.name, key=key)
        return _example(rng, ExerciseCall(tool.name, ((of, key), (field, known.name)), ""), known, of, key, asked)

    return Offer(tool, TASK, question, frozenset(fields), frozenset({"tables"}), frozenset(fields))


def _key(rng: random.Random, known: Property) -> str:
    """One of the keys, two of them, or a word of no language written alike."""
    first, second = rng.choice(known.keys), rng.choice(known.keys)
    draw = rng.random()
    if draw < 0.15:
        word = pseudo_word(rng)
        return word.capitalize() if first[0].isupper() else word
    return first if draw < 0.94 else f"{first} {second}"


def _made_up(rng: random.Random) -> Property:
    """A property with a name of no language."""
    keys = rng.choice((THINGS, FOODS, ANIMALS, PLACES_WORDS))
    draw = rng.choice((_number(10**4), lambda rng: rng.choice(tables.COLORS), pseudo_word, _price, _phone))
    return Property(pseudo_word(rng), ITEM, tuple(keys), SAID, draw)


def _example(rng: random.Random, call: ExerciseCall, known: Property, of: str, key: str, asked: str) -> Example:
    """The question with its call, to which this gives the result."""
    value = known.draw(rng)
    answer, reply = str(value), f"{key}: {value}\nAnswer: {value}"
    as_json = (
        {known.name: value}, {known.name: value}, {"result": value}, {of: key, known.name: value},
    )  # fmt: skip
    draw = rng.random()
    result = answer if draw < 0.45 else json.dumps(rng.choice(as_json))
    if draw > 0.96:
        result, answer, reply = rng.choice(LOST), "unknown", NOTHING
    elif known.name == "weather" and draw > 0.86:
        # Of several fields, none of which has the name of what was asked, all are told.
        sky, degrees = rng.choice(("sunny", "cloudy", "rain", "snow", "clear")), rng.randrange(-20, 45)
        keys = rng.choice((("temperature", "condition"), ("degrees", "sky"), ("temp", "weather_code")))
        result = json.dumps({keys[0]: degrees, keys[1]: sky})
        answer = f"{keys[0]} {degrees}, {keys[1]} {sky}"
        reply = f"{key}: {answer}\nAnswer: {answer}"
    problem = f"look up {known.name} {key} {result}"
    call = ExerciseCall(call.name, call.arguments, result)
    return Example(TASK, asked, reply, answer, problem, is_held_out(problem), call=call)
