"""A layout as a command line names it."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from strata.parallel.layout import Layout

_FLAGS = {"true": True, "false": False}


def read_layout(text: str) -> Layout:
    """A `Layout` from "shard=8,zero=2". Raises ValueError for an unknown field or a value of another type."""
    kinds = get_type_hints(Layout)
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            known = ", ".join(field.name for field in dataclasses.fields(Layout))
            raise ValueError(f"--layout {text}: {name!r} is unknown; known are {known}")
        values[name] = _read(text, name, value, kinds[name])
    return Layout(**values)


def _read(text: str, name: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value not in _FLAGS:
            raise ValueError(f"--layout {text}: {name} = {value!r} must be true or false")
        return _FLAGS[value]
    if kind is str or name == "context":
        return value
    if not value.isdecimal():
        raise ValueError(f"--layout {text}: {name} = {value!r} must be a whole number")
    return int(value)
