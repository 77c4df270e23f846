"""The schemas within a JSON schema, told from values that look like one and names that look like keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
