"""TOML files as frozen dataclasses, read strictly."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Table = TypeVar("Table")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as it is. Raises ValueError if it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"training config {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None


def replaced(values: dict[str, Any], changes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A document with other values. changes: ("section.key", the value as TOML writes it, or bare text).

    Raises ValueError if a change does not name a section and a key; whether they exist, `read_table` decides.
    """
    changed = {name: dict(table) if isinstance(table, dict) else table for name, table in values.items()}
    for path, text in changes:
        section, _, key = path.partition(".")
        if not section or not key:
            raise ValueError(f"--{path}: write --SECTION.KEY VALUE, for example --run.steps 100")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table = changed.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"--{path}: {section} is no section")
        table[key] = value
    return changed


def read_table(cls: type[Table], values: Any, where: str) -> Table:
    """A dataclass from a table: every key known, every value of its type, nothing missing.

    `where` names the table in errors (ValueError). Fields may be dataclasses, and lists of values or of dataclasses.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(fields)}")
    hints = get_type_hints(cls)
    arguments = {}
    for name, one in fields.items():
        if name in values:
            arguments[name] = _value(hints[name], values[name], f"{where}: {name}")
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: {name!r} is missing")
    return cls(**arguments)


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return [_value(parts[0], one, f"{where}[{number}]") for number, one in enumerate(value)]
    if type(None) in parts:  # TOML has no null: what may be None is given or left out
        return _value(next(one for one in parts if one is not type(None)), value, where)
    if dataclasses.is_dataclass(kind):
        return read_table(kind, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if not any(value == one and type(value) is type(one) for one in parts):
            raise ValueError(f"{where} must be one of {', '.join(map(str, parts))}, got {value!r}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    expected = dict if origin is dict else kind
    if type(value) is not expected:
        raise ValueError(f"{where} must be of type {expected.__name__}, got {value!r}")
    return value
