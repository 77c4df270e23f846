"""What a reply must follow, as a grammar: from a request's `response_format` or its tools, checked before use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata.engine.structured_outputs import json_grammar
from strata.serve.errors import ApiError

MOST_BYTES = 64 * 1024
MOST_DEPTH = 32

ToolFormat = Literal["hermes", "llama3"]


@dataclass(frozen=True)
class Grammar:
    """A grammar of llguidance, and the field of the request it was made from, which errors name."""

    text: str
    param: str

    @classmethod
    def json_object(cls, param: str) -> Grammar:
        """Any JSON object."""
        return cls(json_grammar({"type": "object"}), param)

    @classmethod
    def from_json_schema(cls, schema: Any, param: str) -> Grammar:
        """JSON that follows `schema`. Raises ApiError 400 if it is no object, too large or nested too deep."""
        return cls(json_grammar(checked_schema(schema, param)), param)


def response_grammar(response_format: Mapping[str, Any] | None, param: str = "response_format") -> Grammar | None:
    """The grammar of a chat completion's `response_format`; None for text. Raises ApiError 400.

    A schema is enforced whether or not `strict` is set; what cannot be enforced is refused (see `GrammarChecker`).
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _only(response_format, allowed, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object(param)
    if kind != "json_schema":
        raise ApiError(
            400, f"{param}.type must be text, json_object or json_schema, got {kind!r}", param=f"{param}.type"
        )
    return named_schema_grammar(response_format.get("json_schema"), f"{param}.json_schema")


def named_schema_grammar(given: Any, param: str) -> Grammar:
    """The grammar of {"name", "schema", "strict", "description"}, as chat completions and responses name a schema."""
    if not isinstance(given, Mapping):
        raise ApiError(400, f'{param} must be an object with "name" and "schema"', param=param)
    _only(given, {"name", "description", "schema", "strict"}, param)
    if not isinstance(given.get("name"), str):
        raise ApiError(400, f"{param}.name must be a string", param=f"{param}.name")
    if not isinstance(given.get("description", ""), str | None):
        raise ApiError(400, f"{param}.description must be a string", param=f"{param}.description")
    if not isinstance(given.get("strict"), bool | None):
        raise ApiError(400, f"{param}.strict must be true or false", param=f"{param}.strict")
    return Grammar.from_json_schema(given.get("schema"), f"{param}.schema")


def tool_call_grammar(
    functions: Sequence[tuple[str, Mapping[str, Any]]], format: ToolFormat, parallel: bool, param: str = "tools"
) -> Grammar:
    """A reply that is a call of one of the functions (name, JSON schema of its parameters), or several if `parallel`.

    hermes: `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, one call a line.
    llama3: `{"name": ..., "parameters": ...}`, calls joined by "; ".
    Raises ApiError 400 as `Grammar.from_json_schema` does.
    """
    raise NotImplementedError


def checked_schema(schema: Any, param: str) -> dict[str, Any]:
    raise NotImplementedError


class GrammarChecker:
    """Tells whether grammars compile, in a process that can be killed; what was found is remembered."""

    async def check(self, grammar: Grammar) -> None:
        """Raises ApiError 400, code "invalid_grammar", if the engine could not follow the grammar."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process."""


def _only(given: Mapping[str, Any], known: set[str], param: str) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ApiError(400, f"{param}.{unknown} is not supported here", param=f"{param}.{unknown}")
