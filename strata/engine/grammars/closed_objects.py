"""Objects of a JSON schema take no properties but those that it names, where it does not say (as xgrammar has it).

By the standard an object without `additionalProperties` takes any, and a model then invents names until its tokens run
out; pydantic's schemas do not say. `additionalProperties` that is given stays as it is, and so do objects of which the
schema names no property.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from strata.engine.grammars.schema_parts import MAPS_OF_SCHEMAS

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
