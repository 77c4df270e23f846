"""The functions that a request offers to the model: checked, as templates show them, and which calls it may make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from strata.serve.grammar import Grammar, tool_call_grammar
from strata.serve.http.errors import ApiError
from strata.serve.http.validation import shown
from strata.serve.replies.tool_formats import FUNCTION_NAME, TOOL_FORMATS
from strata.text.messages import NO_ARGUMENTS

# Every request carries its tools through the template, and templates have a time limit.
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024


@dataclass(frozen=True)
class OfferedFunction:
    """parameters: JSON schema of the object of arguments; None for a function without any."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or NO_ARGUMENTS

    @property
    def tool(self) -> dict[str, Any]:
        """As clients describe it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Named:
    """A tool_choice that names the one function to be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | Named


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
    functions: Sequence[OfferedFunction],
    choice: ToolChoice | None,
    *,
    parallel: bool,
    tool_format: str | None,
    answer: Grammar | None = None,
    param: str = "tools",
) -> ToolUse:
    """What a request's tools and tool_choice (None is "auto") ask of the server, whose format is `tool_format`.

    answer: what a reply that calls nothing must follow, if anything. Where the model may choose, a reply is then either
        calls or such an answer, and nothing besides.
    param: the field that lists the tools, for errors. Raises ApiError 400.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, but tools is empty", param="tool_choice")
        return ToolUse(grammar=answer)
    _check(functions, param)
    if choice == "none":
        return ToolUse(grammar=answer)
    if tool_format is None:
        raise ApiError(
            400,
            "this server takes no tools: start it with --tool-call-parser hermes or llama3_json, as the model needs",
            param=param,
            code="tools_not_supported",
        )
    callable_functions = _callable(functions, choice)
    grammar = None
    free = choice in (None, "auto")
    if not free or answer is not None:
        described = [(function.name, function.schema) for function in callable_functions]
        several = parallel and not isinstance(choice, Named)
        grammar = tool_call_grammar(described, TOOL_FORMATS[tool_format].name, several, param)
    if free and grammar is not None and answer is not None:
        grammar = Grammar.either(answer, grammar)
    return ToolUse([function.tool for function in functions], tool_format, grammar, parallel)


def _callable(functions: Sequence[OfferedFunction], choice: ToolChoice | None) -> Sequence[OfferedFunction]:
    if not isinstance(choice, Named):
        return functions
    named = [function for function in functions if function.name == choice.name]
    if not named:
        offered = ", ".join(function.name for function in functions)
        raise ApiError(
            400, f"tool_choice names {choice.name!r}, which is not among the tools: {offered}", param="tool_choice"
        )
    return named


def _check(functions: Sequence[OfferedFunction], param: str) -> None:
    if len(functions) > MAX_TOOLS:
        raise ApiError(400, f"{param} has {len(functions)} functions; at most {MAX_TOOLS} are taken", param=param)
    seen: set[str] = set()
    for number, function in enumerate(functions):
        where = f"{param}[{number}]"
        if not FUNCTION_NAME.fullmatch(function.name):
            raise ApiError(
                400,
                f"{where}: a function's name is 1 to 64 letters, digits, _ or -, got {function.name!r}",
                param=where,
            )
        if function.name in seen:
            raise ApiError(400, f"{where}: there is a function {function.name!r} already", param=where)
        seen.add(function.name)
        _check_schema(function.schema, f"{where}.parameters")


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
