"""Says in one line what a request has wrong, and in which field, from what pydantic found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi.exceptions import RequestValidationError

_MAX_SHOWN = 60
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "refused": "unsupported_parameter",
}
_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class FieldExplanation(NamedTuple):
    """param: the field as a path such as "messages[0].content", None for the whole body."""

    message: str
    param: str | None = None
    code: str | None = None


def explain_fault(error: RequestValidationError) -> FieldExplanation:
    """What is said of the first fault."""
    fault = error.errors()[0]
    place, *keys = fault["loc"]
    if fault["type"] == "json_invalid":
        return FieldExplanation(
            f"the body is not JSON that this server reads: {fault['ctx']['error']}", code="invalid_json"
        )
    if fault["type"] == "too_many_fields" and not keys:
        return FieldExplanation(f"the body {_said(fault)}", code="invalid_value")
    if place == "body" and not keys:
        return FieldExplanation(_explain_body(error.body))
    path = field_path(keys, error.body) if place == "body" else ".".join(map(str, keys))
    if fault["type"].startswith("union_tag"):  # a message whose role is missing or unknown
        return _explain_tag(fault, path)
    return FieldExplanation(_explain_field(fault, path), path, _CODES.get(fault["type"], "invalid_value"))


def field_path(keys: Sequence[str | int], body: Any) -> str:
    """The path of a field, without what pydantic puts between keys to say which kind of a union it tried."""
    path, value = "", body
    if keys and keys[-1] == "[key]":  # the key before it is the wrong one
        keys = keys[:-1]
    for number, key in enumerate(keys):
        if isinstance(key, int) and isinstance(value, list):
            path, value = f"{path}[{key}]", value[key] if key < len(value) else None
        elif isinstance(value, dict) and key in value:
            path, value = f"{path}.{key}", value[key]
        elif isinstance(value, dict) and number == len(keys) - 1:  # a field that is missing
            path = f"{path}.{key}"
    return path.removeprefix(".")


def shown(value: Any) -> str:
    """A value for a message, as JSON, cut where it is long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _explain_body(body: Any) -> str:
    if isinstance(body, bytes) and body:
        return "the body must be JSON, sent with the header Content-Type: application/json"
    return f"the body must be a JSON object, got {'nothing' if body in (None, b'') else shown(body)}"


def _explain_tag(fault: dict[str, Any], path: str) -> FieldExplanation:
    name = fault["ctx"]["discriminator"].strip("'")
    param = f"{path}.{name}"
    if fault["type"] == "union_tag_not_found":
        return FieldExplanation(f"{param} is required", param, _CODES["missing"])
    message = f"{param} must be one of {_in_quotes(fault['ctx']['expected_tags'])}, got {shown(fault['input'][name])}"
    return FieldExplanation(message, param, "invalid_value")


def _explain_field(fault: dict[str, Any], path: str) -> str:
    kind = fault["type"]
    if kind == "missing":
        return f"{path} is required"
    if kind == "extra_forbidden":
        return f"{path} is not a field that this server knows; GET /openapi.json lists those it takes"
    if kind == "refused":
        return f"{path} is not supported: {fault['msg']}"
    return f"{path} {_said(fault)}, got {shown(fault['input'])}"


def _said(fault: dict[str, Any]) -> str:
    """What was expected, in the words of JSON rather than in those of Python and pydantic."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {shown(context[bound]).removesuffix('.0')}"
    if kind == "literal_error":
        return f"must be {_in_quotes(context['expected'])}"
    if kind == "string_pattern_mismatch":
        return "has characters, or a form, that are not taken here"
    return re.sub(r"^\w+ should ", "must ", fault["msg"]).partition(" after validation")[0]


def _in_quotes(names: str) -> str:
    """Names as JSON writes them."""
    return names.replace("'", '"')
