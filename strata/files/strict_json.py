"""JSON that strangers wrote, read strictly: no NaN, no number too large, no half characters, no deep nesting."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

MAX_NESTING = 64
MAX_CONTAINERS = 10_000  # objects and arrays; each costs a hundred times what a character of a string does

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def read_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises json.JSONDecodeError (a ValueError) for what is none, too deep, or has too many objects and arrays.
    """
    brackets = body.count(b"{") + body.count(b"[")
    if brackets > MAX_CONTAINERS:  # unless most of them are in strings
        outside = _STRING.sub(b"", body)
        if outside.count(b"{") + outside.count(b"[") > MAX_CONTAINERS:
            raise _fault(f"it has more than {MAX_CONTAINERS:,} objects and arrays")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _fault(f"it nests more than {MAX_NESTING} levels deep") from None
    except UnicodeDecodeError:
        raise _fault("it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise _fault(_in_words(str(error))) from None
    if brackets > MAX_NESTING and _deeper_than(value, MAX_NESTING):
        raise _fault(f"it nests more than {MAX_NESTING} levels deep")
    return value


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        containers = [one for one in layer if isinstance(one, (dict, list))]
        layer = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]
        if not containers:
            return False
    return True


def _in_words(message: str) -> str:
    """msgspec's words without its names for things and places."""
    if message.startswith("Input data was truncated"):
        return "it ends too soon, or a character in it is but a half"
    if message.startswith("Number out of range"):
        return "a number in it is out of range"
    return message.removeprefix("JSON is malformed: ").partition(" - at ")[0]


def _fault(message: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(message, "", 0)
