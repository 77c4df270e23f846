"""TOML files as frozen dataclasses, read strictly, with errors that name the line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from strata.files.json_object import why_no_text

Table = TypeVar("Table")
# What tomllib says; the beginnings of a section and of a value.
_AT = re.compile(r"(.*) \(at (.*)\)", re.DOTALL)
_HEADER = re.compile(r"\s*\[+\s*([\w-]+)")
_PAIR = re.compile(r"\s*([\w-]+)\s*=")
# A value that a dataclass refuses, as it names it.
_NAMED = re.compile(r"\w+\.(\w+) ")


class WrongTable(ValueError):
    """What a table must not say. keys: of the value that is wrong, from the outermost table in."""

    def __init__(self, message: str, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.keys = keys


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """A TOML file as it is, and its text. Raises ValueError, with line and column, if it is missing or no TOML."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise ValueError(f"training config {path} does not exist") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}, {why_no_text(data)}") from None
    except tomllib.TOMLDecodeError as error:
        reason, place = _AT.fullmatch(str(error)).groups()  # type: ignore[union-attr]
        end = f"line {text.rstrip().count(chr(10)) + 1}"
        raise ValueError(f"{path}, {end if place == 'end of document' else place}: not TOML: {reason}") from None
    except (ValueError, RecursionError):  # of an integer of thousands of digits; of lists in lists in lists
        raise ValueError(
            f"{path}: not TOML that can be read: a number is too long, or a value nests too deep"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """Where a TOML text gives a value of a section, keys = (section, key, ...), or where the section begins."""
    section, found = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[1]
            found = number if [section] == [*keys[:1]] else found
        elif (pair := _PAIR.match(line)) and [section, pair[1]] == [*keys[:2]]:
            return number
    return found


def replaced(values: dict[str, Any], changes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A document with other values. changes: ("section.key", the value as TOML or Python writes it, or bare text).

    Raises ValueError if a change does not name a section and a key; whether they exist, `read_table` decides.
    """
    changed = {name: dict(table) if isinstance(table, dict) else table for name, table in values.items()}
    for path, text in changes:
        section, _, key = path.partition(".")
        if not section or not key:
            raise ValueError(f"--{path}: write --SECTION.KEY VALUE, for example --run.steps 100")
        table = changed.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"--{path}: {section} is no section")
        table[key] = _value_of(text)
    return changed


def read_table(cls: type[Table], values: Any, keys: tuple[str, ...] = ()) -> Table:
    """A dataclass from a table: every key known, every value of its type, nothing missing.

    keys: where the table stands. Fields may be dataclasses, and lists of values or of dataclasses. Raises WrongTable.
    """
    where = _where(keys)
    if not isinstance(values, dict):
        raise WrongTable(f"{where} must be a table, got {values!r}", keys)
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - fields.keys()):
        place = (*keys, unknown[0])
        raise WrongTable(f"{_before(where)}unknown key {unknown[0]!r}; known are {', '.join(fields)}", place)
    hints = get_type_hints(cls)
    arguments = {}
    for name, one in fields.items():
        if name in values:
            arguments[name] = _value(hints[name], values[name], (*keys, name))
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise WrongTable(f"{_before(where)}{name!r} is missing", keys)
    try:
        return cls(**arguments)
    except ValueError as error:
        named = _NAMED.match(str(error))
        raise WrongTable(str(error), (*keys, named[1]) if named and keys else keys) from None


def _value_of(text: str) -> Any:
    """Of a text on the command line: as TOML writes it, as Python does (True, .5), or the bare text."""
    if text in ("True", "False"):
        return text == "True"
    for read in (lambda: tomllib.loads(f"value = {text}")["value"], lambda: float(text)):
        try:
            return read()
        except ValueError:  # also of TOML
            continue
    return text


def _value(kind: Any, value: Any, keys: tuple[str, ...]) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        if not isinstance(value, list):
            raise WrongTable(f"{_where(keys)} must be a list, got {value!r}", keys)
        inner = [(*keys[:-1], f"{keys[-1]}[{number}]") for number in range(len(value))]
        return [_value(parts[0], one, place) for one, place in zip(value, inner, strict=True)]
    if type(None) in parts:  # TOML has no null: what may be None is given or left out
        return _value(next(one for one in parts if one is not type(None)), value, keys)
    if dataclasses.is_dataclass(kind):
        return read_table(kind, value, keys)  # type: ignore[arg-type]
    if origin is Literal:
        if not any(value == one and type(value) is type(one) for one in parts):
            raise WrongTable(f"{_where(keys)} must be one of {', '.join(map(str, parts))}, got {value!r}", keys)
        return value
    if kind is float and type(value) is int:
        return float(value)
    expected = dict if origin is dict else kind
    if type(value) is not expected:
        raise WrongTable(f"{_where(keys)} must be of type {expected.__name__}, got {value!r}", keys)
    return value


def _where(keys: tuple[str, ...]) -> str:
    return ": ".join(keys)


def _before(where: str) -> str:
    return f"{where}: " if where else ""
