"""The functions that a request offers to the model: checked, as templates show them, and which calls it may make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from strata.serve.grammar import Grammar, tool_call_grammar
from strata.serve.http.errors import ApiError
from strata.serve.http.validation import shown
from strata.serve.replies.tool_formats import TOOL_FORMATS
from strata.serve.schema.chat import Function, NamedTool
from strata.serve.schema.responses import ResponsesNamedTool

MAX_SCHEMA_BYTES = 64 * 1024

ToolChoice = Literal["none", "auto", "required"] | NamedTool | ResponsesNamedTool


@dataclass(frozen=True)
class ToolUse:
    """What comes of a request's tools.

    shown: for the chat template. tool_format: for `ReplyParser`. Both are None where no tools may be used.
    grammar: what the reply must follow, if a call is forced or the answer has a form; it leaves no room for reasoning.
    parallel: may a reply hold several calls.
    """

    shown: list[dict[str, Any]] | None = None
    tool_format: str | None = None
    grammar: Grammar | None = None
    parallel: bool = True


def use_tools(
    functions: Sequence[Function],
    choice: ToolChoice | None,
    *,
    parallel: bool,
    tool_format: str | None,
    answer: Grammar | None = None,
) -> ToolUse:
    """What a request's tools and tool_choice (None is "auto") ask of the server, whose format is `tool_format`.

    answer: what a reply that calls nothing must follow, if anything. Where the model may choose, a reply is then either
        calls or such an answer, and nothing besides.
    Raises ApiError 400.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, but tools is empty", param="tool_choice")
        return ToolUse(grammar=answer)
    _check(functions)
    if choice == "none":
        return ToolUse(grammar=answer)
    if tool_format is None:
        raise ApiError(
            400,
            "this server takes no tools: start it with --tool-call-parser hermes or llama3_json, as the model needs",
            param="tools",
            code="tools_not_supported",
        )
    named = None if choice is None or isinstance(choice, str) else choice.name
    grammar = None
    free = choice in (None, "auto")
    if not free or answer is not None:
        callable_functions = [one for one in functions if named in (None, one.name)]
        if not callable_functions:
            offered = ", ".join(function.name for function in functions)
            message = f"tool_choice names {named!r}, which is not among the tools: {offered}"
            raise ApiError(400, message, param="tool_choice")
        described = [(function.name, function.schema_of_arguments) for function in callable_functions]
        grammar = tool_call_grammar(described, TOOL_FORMATS[tool_format].name, parallel and named is None)
    if free and grammar is not None and answer is not None:
        grammar = Grammar.either(answer, grammar)
    return ToolUse([function.tool for function in functions], tool_format, grammar, parallel)


def _check(functions: Sequence[Function]) -> None:
    seen: set[str] = set()
    for number, function in enumerate(functions):
        where = f"tools[{number}]"
        if function.name in seen:
            raise ApiError(400, f"{where}: there is a function {function.name!r} already", param=where)
        seen.add(function.name)
        _check_schema(function.schema_of_arguments, f"{where}.parameters")


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Light: a schema that a call is forced to follow is compiled as well."""
    if schema.get("type", "object") != "object":
        raise ApiError(
            400, f'{where} must be a JSON schema of type "object", got type {shown(schema["type"])}', param=where
        )
    if not isinstance(schema.get("properties", {}), Mapping):
        raise ApiError(400, f"{where}.properties must be an object of JSON schemas", param=where)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError(400, f"{where}.required must be a list of property names", param=where)
    if (size := len(msgspec.json.encode(schema))) > MAX_SCHEMA_BYTES:
        raise ApiError(400, f"{where} is {size} bytes of JSON; at most {MAX_SCHEMA_BYTES} are taken", param=where)
