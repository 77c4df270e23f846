"""Tools that tell a property of something: its price, its weather, or a word that the model has never seen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from strata.train.tasks import tables
from strata.train.tasks.example import Example, Offer, ask, is_held_out
from strata.train.tasks.smalltalk import TEXTS as SMALL_TALK
from strata.train.tasks.tool import Argument, ExerciseCall, ExerciseTool
from strata.train.tasks.words import ANIMALS, FOODS, NAMES, PLACES_WORDS, THINGS, pseudo_word, texts

TEXTS = texts("lookups")
CITIES: list[str] = tables.TEXTS["cities"]
COLORS: list[str] = tables.TEXTS["colors"]
TASK = "calling a look-up"
NOTHING = "Nothing was found.\nAnswer: unknown"


@dataclass(frozen=True)
class Property:
    """name: as tools call it. of: what tools call the thing that has it. draw: a value. topics: see `Offer`."""

    name: str
    of: tuple[str, ...]
    keys: list[str]
    phrasings: list[str]
    draw: Callable[[random.Random], str | int | float]
    topics: frozenset[str] = frozenset()


def _number(below: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(1, below)


def _price(rng: random.Random) -> float | int:
    return rng.randrange(1, 500) if rng.random() < 0.5 else rng.randrange(1, 10_000) / 100


def _weather(rng: random.Random) -> str:
    sky = rng.choice(TEXTS["skies"])
    return rng.choice((sky, f"{sky}, {rng.randrange(-15, 40)} degrees", f"{rng.randrange(-15, 40)} degrees and {sky}"))


def _phone(rng: random.Random) -> str:
    return f"{rng.randrange(100, 1000)} {rng.randrange(1000, 10000)}"


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES)


def _color(rng: random.Random) -> str:
    return rng.choice(COLORS)


ITEM, PERSON, CITY = ("item", "product", "thing", "name"), ("name", "person", "who"), ("city", "location", "place")
_ASKED, _WEATHER = TEXTS["asked"], frozenset({"weather"})

PROPERTIES = (
    Property("price", ITEM, THINGS + FOODS, tables.TEXTS["price"], _price),
    Property("age", PERSON, NAMES, tables.TEXTS["age"], _number(100)),
    Property("city", PERSON, NAMES, tables.TEXTS["city"], _city),
    Property("color", ITEM, THINGS, tables.TEXTS["color"], _color),
    Property("weather", CITY, CITIES, _ASKED["weather"], _weather, _WEATHER),
    Property("temperature", CITY, CITIES, _ASKED["temperature"], lambda rng: rng.randrange(-20, 45), _WEATHER),
    Property("population", CITY, CITIES, _ASKED["population"], _number(10**7), frozenset({"people live"})),
    Property(
        "capital", ("country", "state", "name"), SMALL_TALK["countries"], _ASKED["capital"], _city,
        frozenset({"capital"}),
    ),
    Property(
        "time", CITY, CITIES, _ASKED["time"], lambda rng: f"{rng.randrange(24):02}:{rng.randrange(60):02}",
        frozenset({"time is it"}),
    ),
    Property("phone", PERSON, NAMES, _ASKED["phone"], _phone),
    Property("stock", ITEM, THINGS + FOODS, _ASKED["stock"], _number(1000)),
    Property("owner", ITEM, THINGS, _ASKED["owner"], lambda rng: rng.choice(NAMES)),
)  # fmt: skip


UNITS = ("celsius", "fahrenheit")


def look_up(rng: random.Random) -> Offer:
    """A tool for one property."""
    known = rng.choice(PROPERTIES) if rng.random() < 0.7 else _made_up(rng)
    of = rng.choice(known.of)
    called, verb = rng.choice(TEXTS["called"]), rng.choice(TEXTS["verbs"])
    name = called.format(verb=verb, name=known.name, of=of, any=pseudo_word(rng))
    about = rng.choice(TEXTS["about"]).format(name=known.name, of=of)
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
    of, field = rng.choice(ITEM), rng.choice(TEXTS["fields"])
    tool = ExerciseTool(
        rng.choice(TEXTS["general"]),
        rng.choice(("Looks up a table.", f"What is known of a {of}.", "Reads the database.", "")),
        (Argument(of), Argument(field, choices=fields)),
    )

    def question(rng: random.Random) -> Example:
        known = replace(kind, name=rng.choice(fields))
        key = _key(rng, known)
        asked = ask(rng, known.phrasings, name=known.name, key=key)
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
    draw = rng.choice((_number(10**4), _color, pseudo_word, _price, _phone))
    return Property(pseudo_word(rng), ITEM, keys, TEXTS["said"], draw)


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
        result, answer, reply = rng.choice(TEXTS["lost"]), "unknown", NOTHING
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
