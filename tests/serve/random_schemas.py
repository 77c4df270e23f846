"""JSON schemas drawn by a seed: the keywords that grammars enforce, nested and combined."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{2}$",
    "^(red|green|blue)$",
    "^A.{0,6}z$",
    r"^[^\s]{1,4}$",
    "^(ab){0,3}c?$",
    "^[A-Z][a-zé]{0,5}",
)
FORMATS = ("date", "uuid", "ipv4")
NAMES = ("id", "name", "größe", "a b", 'quo"te', "x/y", "tags", "$ref", "type", "")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -7,
    2.5,
    "",
    "yes",
    'say "no"',
    "línea\n",
    "😀",
    [],
    [1, "two"],
    {"k": [None]},
)


class _Chance(random.Random):
    def __init__(self, seed: int, closed: bool) -> None:
        super().__init__(seed)
        self.closed = closed


def random_schema(seed: int, closed: bool = False) -> Schema:
    """An object, mostly; sometimes with definitions that refer to themselves.

    closed: nothing has outputs without end but numbers with many decimals, so that any model comes to an end.
    """
    chance = _Chance(seed, closed)
    if chance.random() < 0.15 and not closed:
        return _tree(chance)
    schema = _object(chance, 3) if chance.random() < 0.8 else _any(chance, 3)
    if chance.random() < 0.2:
        shared = {"shared": _any(chance, 1)}
        return {"$defs": shared, "type": "array", "items": {"$ref": "#/$defs/shared"}, "minItems": 1, "maxItems": 3}
    return schema


def _any(chance: _Chance, depth: int) -> Schema:
    leaves: list[Callable[[_Chance], Schema]] = [_string, _integer, _number, _constant, _plain]
    if depth == 0 or chance.random() < 0.4:
        return chance.choice(leaves)(chance)
    inner = (_object, _array, _union) if chance.closed else (_object, _array, _union, _merged)
    return chance.choice(inner)(chance, depth - 1)


def _object(chance: _Chance, depth: int) -> Schema:
    names = chance.sample(NAMES, chance.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(chance, depth) for name in names}}
    schema["required"] = [name for name in names if chance.random() < 0.6]
    kind = chance.random()
    if kind < 0.7 or chance.closed:
        schema["additionalProperties"] = False
    elif kind < 0.85:
        schema["additionalProperties"] = _integer(chance)
    elif kind < 0.95:
        schema["patternProperties"] = {"^x_[a-z]{1,3}$": _integer(chance)}
        schema["additionalProperties"] = False
    return schema


def _array(chance: _Chance, depth: int) -> Schema:
    least = chance.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(chance, depth), "minItems": least}
    schema["maxItems"] = least + chance.randint(0, 2)
    if chance.random() < 0.2:
        schema["prefixItems"] = [_any(chance, depth) for _ in range(chance.randint(1, 2))]
        schema["maxItems"] += len(schema["prefixItems"])
    return schema


def _union(chance: _Chance, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(1, 3))]}


def _merged(chance: _Chance, depth: int) -> Schema:
    """Two objects at once, of different properties."""
    first, second = _object(chance, depth), _object(chance, depth)
    for one in (first, second):
        one.pop("additionalProperties", None)
        one.pop("patternProperties", None)
    for name in first["properties"]:
        second["properties"].pop(name, None)
    second["required"] = [name for name in second["required"] if name in second["properties"]]
    return {"allOf": [first, second]}


def _string(chance: _Chance) -> Schema:
    kind = chance.random()
    if kind < 0.3:
        patterns = [pattern for pattern in PATTERNS if pattern.endswith("$") or not chance.closed]
        return {"type": "string", "pattern": chance.choice(patterns)}
    if kind < 0.5:
        return {"type": "string", "format": chance.choice(FORMATS)}
    least = chance.randint(0, 5)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 12)}


def _integer(chance: _Chance) -> Schema:
    low = chance.randint(-1000, 1000)
    schema: Schema = {"type": "integer"}
    if chance.random() < 0.7 or chance.closed:
        schema[chance.choice(("minimum", "exclusiveMinimum"))] = low
    if chance.random() < 0.7 or chance.closed:
        schema[chance.choice(("maximum", "exclusiveMaximum"))] = low + chance.randint(12, 2000)
    if chance.random() < 0.15:
        schema["multipleOf"] = chance.choice((2, 3, 10))
    return schema


def _number(chance: _Chance) -> Schema:
    """With a bound: one that has none may be written with an exponent that no float can hold."""
    low = round(chance.uniform(-50, 50), chance.randint(0, 3))
    lower = {chance.choice(("minimum", "exclusiveMinimum")): low}
    upper = {chance.choice(("maximum", "exclusiveMaximum")): low + chance.choice((0.5, 3.25, 100))}
    return {"type": "number", **(lower | upper if chance.closed else chance.choice((lower, upper, lower | upper)))}


def _constant(chance: _Chance) -> Schema:
    if chance.random() < 0.3:
        return {"const": chance.choice(VALUES)}
    return {"enum": chance.sample(VALUES, chance.randint(1, 4))}


def _plain(chance: _Chance) -> Schema:
    kind = chance.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))
    return {"type": kind, "maxLength": 8, "minimum": -5, "maximum": 50}


def _tree(chance: _Chance) -> Schema:
    """A node whose children are such nodes."""
    node: Schema = {
        "type": "object",
        "properties": {
            "value": _any(chance, 0),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
