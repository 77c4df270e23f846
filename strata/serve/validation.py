"""Says in one line what a request has wrong, and in which field, from what pydantic found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

_MOST_SHOWN = 60


def explain_fault(error: RequestValidationError) -> tuple[str, str | None]:
    """The message for the first fault, and its field as a path such as "messages[0].content" (None: the whole body)."""
    fault = error.errors()[0]
    place, *keys = fault["loc"]
    if fault["type"] == "json_invalid":
        return f"the body is not JSON that this server reads: {fault['ctx']['error']}", None
    if place == "body" and not keys:
        return _explain_body(error.body), None
    path = field_path(keys, error.body) if place == "body" else ".".join(map(str, keys))
    return _explain_field(fault, path), path or None


def field_path(keys: Sequence[str | int], body: Any) -> str:
    """The path of a field, without what pydantic puts between keys to say which kind of a union it tried."""
    path, value = "", body
    for number, key in enumerate(keys):
        if isinstance(key, int) and isinstance(value, list):
            path, value = f"{path}[{key}]", value[key] if key < len(value) else None
        elif isinstance(value, dict) and key in value:
            path, value = f"{path}.{key}", value[key]
        elif isinstance(value, dict) and number == len(keys) - 1:  # a field that is missing
            path = f"{path}.{key}"
    return path.removeprefix(".")


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value[:_MOST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _explain_body(body: Any) -> str:
    if isinstance(body, bytes) and body:
        return "the body must be JSON, sent with the header Content-Type: application/json"
    return f"the body must be a JSON object, got {'nothing' if body in (None, b'') else shown(body)}"


def _explain_field(fault: dict[str, Any], path: str) -> str:
    kind = fault["type"]
    if kind == "missing":
        return f"{path} is required"
    if kind == "extra_forbidden":
        return f"{path} is not a field that this server knows; GET /openapi.json lists those it takes"
    if kind == "refused":
        return f"{path} is not supported: {fault['msg']}"
    if kind.startswith("union_tag"):
        tag = fault["ctx"]["discriminator"].strip("'")
        given = fault["input"].get(tag) if isinstance(fault["input"], dict) else fault["input"]
        return f"{path}: {tag} must be one of {fault['ctx'].get('expected_tags', 'those listed')}, got {shown(given)}"
    said = re.sub(r"^\w+ should ", "must ", fault["msg"])
    return f"{path} {said}, got {shown(fault['input'])}"
