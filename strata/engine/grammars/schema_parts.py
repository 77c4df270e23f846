"""JSON schemas as llguidance is to read them: bounds of numbers moved, formats written as patterns, objects closed.

The schemas within a schema are told from values that look like one and names that look like keywords.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")  # what is in them is no schema


def with_schemas_changed(
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The schema with each one right within it changed; those deeper inside are for `change`."""
    made = {}
    for keyword, value in schema.items():
        if keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            made[keyword] = {name: _changed(one, change) for name, one in value.items()}
        else:
            made[keyword] = value if keyword in _VALUES else _changed(value, change)
    return made


def _changed(value: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    if isinstance(value, Mapping):
        return change(value)
    return [_changed(one, change) for one in value] if isinstance(value, list) else value


# Numbers are kept off the bounds that a schema excludes, where llguidance 1.9.1 lets them in. Its pattern for
# `{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}` takes 0, and likewise wherever an excluded bound is a
# whole number and the other bound is less than 1 away. Such a bound is moved inwards and included.

# Share of the distance between two bounds that is lost at an excluded one.
_LOST = 1e-6

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def with_inner_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with the excluded bounds moved that would not hold; anything else is as it was."""
    return with_schemas_changed(_moved(schema), with_inner_bounds)


def _moved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    bounds = {key: schema[key] for key in _BOUNDS if _is_number(schema.get(key))}
    low = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=-math.inf)
    high = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=math.inf)
    if not 0 < high - low < 1:
        return schema
    moved = dict(schema)
    for excluded, included, bound, inwards in (
        ("exclusiveMinimum", "minimum", low, 1),
        ("exclusiveMaximum", "maximum", high, -1),
    ):
        if bounds.get(excluded) == bound and bound == int(bound):
            del moved[excluded]
            moved[included] = bound + inwards * _LOST * (high - low)
    return moved


def _is_number(value: Any) -> bool:
    """One that a float can hold; of others there is nothing to mend."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


# What a string's `format` is, as patterns; a format that is not here asserts nothing. That is how JSON Schema 2020-12
# has it: `format` is an annotation. llguidance refuses the ones that it does not know, and takes 2023-02-29 for a date.

# RFC 3339, with the days that a month has; a leap second is the last of a day of UTC.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:{_MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{_MINUTE})|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"

# RFC 3339, appendix A: units without gaps, or weeks.
_TIME_UNITS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATE_UNITS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DATE_UNITS}(?:{_TIME_UNITS})?|{_TIME_UNITS}|[0-9]+W)"

# RFC 2673 (dotted quad) and RFC 4291, as the grammar of RFC 3986 writes it out.
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_BEFORE_LAST = "|".join(
    [
        f"(?:{_GROUP}:){{6}}",
        f"::(?:{_GROUP}:){{5}}",
        *(f"(?:(?:{_GROUP}:){{0,{4 - n}}}{_GROUP})?::(?:{_GROUP}:){{{n}}}" for n in range(4, -1, -1)),
    ]
)
_IPV6 = (
    f"(?:(?:{_BEFORE_LAST})(?:{_GROUP}:{_GROUP}|{_IPV4})"
    f"|(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}|(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::)"
)

# RFC 1123, section 2.1.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

# RFC 5321, section 4.1.2, without the quoted local parts that it advises against.
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\]|\[IPv6:{_IPV6}\])"

# RFC 3986.
_PERCENT = "%[0-9a-fA-F]{2}"
_NAME = f"(?:[!$&-.0-9;=A-Z_a-z~]|{_PERCENT})*"  # of unreserved characters and sub-delims
_USER = f"(?:[!$&-.0-;=A-Z_a-z~]|{_PERCENT})*"  # and colons
_SEGMENT = f"(?:[!$&-.0-;=@-Z_a-z~]|{_PERCENT})"  # and at signs
_TAIL = f"(?:[!$&-;=?-Z_a-z~]|{_PERCENT})*"  # and slashes and question marks
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[!$&-.0-;=A-Z_a-z~]+)\]|{_NAME})"
_AUTHORITY = f"(?:{_USER}@)?{_HOST}(?::[0-9]*)?"
_REST = f"{_SEGMENT}+(?:/{_SEGMENT}*)*"
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_REST})?|(?:{_REST})?)"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_TAIL})?(?:#{_TAIL})?"

# RFC 4122.
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# What a whole string follows, all of it.
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[tT]{_TIME}",),
    "duration": (_DURATION,),
    "email": (_EMAIL, "[^@]{1,64}@.*", ".{1,254}"),
    "hostname": (_HOSTNAME, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uri": (_URI,),
    "uuid": (_UUID,),
}


def with_formats_as_patterns(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with each known `format` as patterns, beside the one that may be there, and without the others."""
    made = with_schemas_changed(schema, with_formats_as_patterns)
    if isinstance(made.get("format"), str):
        patterns = [{"pattern": f"^(?:{pattern})$"} for pattern in PATTERNS.get(made.pop("format"), ())]
        others = made.get("allOf", [])
        if patterns and isinstance(others, list):
            made["allOf"] = [*others, *patterns]
    return made


# Objects take no properties but those that the schema names, where it does not say (as xgrammar has it). By the
# standard an object without `additionalProperties` takes any, and a model then invents names until its tokens run out;
# pydantic's schemas do not say. `additionalProperties` that is given stays as it is, and so do objects of which the
# schema names no property.
_NAMED = ("properties", "patternProperties")
_SAID = ("additionalProperties", "unevaluatedProperties")
_CHOICES = ("anyOf", "oneOf")
# An object that one of these describes, or one of its parts, may need more properties than the schema names.
_UNTOUCHED = ("enum", "const", "minProperties")
_SCHEMAS = ("items", "additionalProperties", "contains")
# How many schemas and names may be gathered of objects that several schemas describe: each of n may name n others.
_MAX_GATHERED = 20_000


def with_closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` wherever properties are named and nothing is said of others.

    A schema with references to anything but places in itself ("#/...") is left as it is. Raises ValueError if too many
    of its parts describe the same objects.
    """
    if not all(ref == "#" or ref.startswith("#/") for ref in _references(schema)):
        return dict(schema)
    return _Closing(schema).whole()


class _Closing:
    """Schemas that hold for one and the same object (allOf, or anyOf beside properties) cannot be closed one by one:
    nothing would satisfy them together. They stay open, and what they are part of is closed to all their names.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open_names: dict[int, str] = {}  # of schemas, by their identity: a reference has many spellings
        self._taken_names = set(_mapping(root, "$defs"))
        self._to_open: deque[tuple[str, Any]] = deque()
        self._gathered = 0

    def whole(self) -> dict[str, Any]:
        closed: dict[str, Any] = self._schema(self._root, True)
        opened = {}
        while self._to_open:
            name, target = self._to_open.popleft()
            opened[name] = self._schema(target, False)
        if opened:
            closed["$defs"] = {**_mapping(closed, "$defs"), **opened}
        return closed

    def _schema(self, given: Any, closed: bool) -> Any:
        """closed: objects take no other properties; if not, those inside of them do not."""
        if not isinstance(given, Mapping):
            return given
        alone = self._is_alone(given)
        made = {keyword: self._keyword(keyword, value, closed and alone) for keyword, value in given.items()}
        if closed and not any(keyword in given for keyword in _UNTOUCHED):
            self._close(given, made, alone)
        return made

    def _is_alone(self, given: Mapping[str, Any]) -> bool:
        """Whether at most one part says something of the object, so that this one can be closed."""
        parts = list(_parts(given))
        if len(parts) != 1 or parts[0] is given:
            return len(parts) <= 1
        if any(keyword in given for keyword in (*_SAID, *_UNTOUCHED)):
            return False
        required = {name for name in _list(given, "required") if isinstance(name, str)}
        if required:
            inner = (one for one in self._same_object(given) if one is not given)
            required.difference_update(name for one in inner for name in _names(one, "properties"))
        return not required

    def _keyword(self, keyword: str, value: Any, closed: bool) -> Any:
        if keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            return {name: self._schema(one, True) for name, one in value.items()}
        if keyword in ("allOf", *_CHOICES) and isinstance(value, list):
            return [self._schema(one, closed) for one in value]
        if keyword in ("items", "prefixItems") and isinstance(value, list):
            return [self._schema(one, True) for one in value]
        if keyword in _SCHEMAS:
            return self._schema(value, True)
        if keyword == "$ref" and isinstance(value, str) and not closed:
            return self._open_reference(value)
        return value

    def _close(self, given: Mapping[str, Any], made: dict[str, Any], alone: bool) -> None:
        if alone and not any(keyword in given for keyword in _NAMED):
            return  # its one part is closed
        same_object = list(self._same_object(given))
        keywords = {keyword for one in same_object for keyword in one}
        if not keywords.intersection(_NAMED) or keywords.intersection((*_SAID, *_UNTOUCHED)):
            return
        for keyword in _NAMED:
            names = {name: True for one in same_object for name in _names(one, keyword)}
            self._count(len(names))
            if names and isinstance(made.get(keyword, {}), Mapping):
                made[keyword] = {**names, **made.get(keyword, {})}
        made["additionalProperties"] = False

    def _same_object(self, given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """All schemas that hold, or may hold, for the object that this one describes; itself first."""
        referred: set[int] = set()
        ahead: list[Any] = [given]
        while ahead:
            one = ahead.pop()
            if not isinstance(one, Mapping):
                continue
            self._count(1)
            yield one
            inner = [part for keyword in ("allOf", *_CHOICES) for part in _list(one, keyword)]
            if isinstance(one.get("$ref"), str):
                target = self._target(one["$ref"])
                if id(target) not in referred:
                    referred.add(id(target))
                    inner.append(target)
            ahead.extend(reversed(inner))

    def _count(self, gathered: int) -> None:
        self._gathered += gathered
        if self._gathered > _MAX_GATHERED:
            raise ValueError("too many parts of the schema (allOf, anyOf, $ref) describe the same objects: join some")

    def _open_reference(self, reference: str) -> str:
        """A reference to the same schema left open."""
        target = self._target(reference)
        schema = id(target)
        if schema not in self._open_names:
            number = len(self._open_names)
            while (name := f"open-{number}") in self._taken_names:
                number += 1
            self._taken_names.add(name)
            self._open_names[schema] = name
            if isinstance(target, Mapping):
                target = {keyword: value for keyword, value in target.items() if keyword not in ("$defs", "$id")}
            self._to_open.append((name, target))
        return f"#/$defs/{self._open_names[schema]}"

    def _target(self, reference: str) -> Any:
        """What a reference stands for; True, which says nothing, if it leads nowhere (compiling the schema tells)."""
        target: Any = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, Mapping) and name in target:
                target = target[name]
            else:
                return True
        return target


def _parts(given: Mapping[str, Any]) -> Iterator[Any]:
    """The parts that each say something of the same object."""
    if any(keyword in given for keyword in _NAMED):
        yield given
    yield from _list(given, "allOf")
    for keyword in ("$ref", *_CHOICES):
        if keyword in given:
            yield given[keyword]


def _names(given: Mapping[str, Any], keyword: str) -> Iterator[str]:
    yield from _mapping(given, keyword)
    if keyword == "properties":
        yield from (name for name in _list(given, "required") if isinstance(name, str))


def _mapping(given: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    """A keyword's value; empty if there is none, or one of another kind (compiling the schema tells)."""
    value = given.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _list(given: Mapping[str, Any], keyword: str) -> list[Any]:
    value = given.get(keyword)
    return value if isinstance(value, list) else []


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _references(one)
