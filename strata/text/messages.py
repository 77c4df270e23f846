"""OpenAI's messages and tools as chat templates take them: one form, whoever hands them over.

Templates differ in what they make of a list of parts, of arguments that are JSON text already, of null and of empty
lists; none of that is left here. Servers, `LLM.chat` and training data all come through this, so that a model is asked
what it was taught.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.files.strict_json import read_json

Message = Mapping[str, Any]

NO_ARGUMENTS = {"type": "object", "properties": {}}
"""The parameters of a function that names none."""

# The names that reasoning goes by; of several the first that is not empty is taken.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Parts of a content, by the field that has the text of each.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Whose messages must have a content, perhaps an empty one; the assistant may only call, others are a template's own.
_NEEDS_CONTENT = ("system", "user", "tool")
_NOT_READ = {"audio": "only text is read", "function_call": "that is the older form, use tool_calls"}


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the one form; such messages come back as they are.

    content: a string; parts of text are joined by line breaks, and an assistant's that is null is its refusal or empty.
    role: "system" for "developer". tool_calls: absent if there are none, and each with its arguments as an object;
    those that are no JSON object stay the text that they are, as the model once wrote it. reasoning_content: by that
    name, and a string. Fields without a value are left out, others stay.

    Raises ValueError, which names the field, for what is no message or more than text.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list with at least one message, got {short(messages)}")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def tools_for_template(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions that the model may call, each as {"type": "function", "function": {"name", "description",
    "parameters", ...}}; None if there are none.

    A function may also come without what is around it, as in /v1/responses. `strict` is left out: it asks something of
    servers. Raises ValueError for what is no function.
    """
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools must be a list of functions, got {short(tools)}")
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())] or None


def text_of(content: Any, place: str = "content") -> str:
    """A content as one string. place: how an error calls it. Raises ValueError if it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise ValueError(f'{place} must be a string or a list of {{"type": "text", "text": ...}}, got {short(content)}')
    return "\n".join(_text_of_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def says_nothing(message: Message) -> bool:
    """Whether a message in the one form has no text, no call and no reasoning."""
    return not (
        str(message.get("content") or "").strip() or "tool_calls" in message or message.get("reasoning_content")
    )


def short(value: Any) -> str:
    """A value for an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f'{place} must be like {{"role": "user", "content": "..."}}, got {short(message)}')
    for name, reason in _NOT_READ.items():
        if message.get(name) is not None:
            raise ValueError(f"{place}.{name} is not supported: {reason}")
    # Clients send null for what is not there, and templates would print it.
    shown = {key: value for key, value in message.items() if value is not None}
    if shown["role"] == "developer":
        shown["role"] = "system"
    role = shown["role"]
    if role in _NEEDS_CONTENT and "content" not in shown:
        raise ValueError(f"{place}.content is missing: a message of the {role} has a text, which may be empty")
    refusal = shown.pop("refusal", None) if role == "assistant" else None
    if "content" in shown or role == "assistant":
        shown["content"] = text_of(shown.get("content"), f"{place}.content") or text_of(refusal, f"{place}.refusal")
    reasoning = [text_of(shown.pop(name), f"{place}.{name}") for name in REASONING_FIELDS if name in shown]
    if reasoning:
        shown["reasoning_content"] = next(filter(None, reasoning), "")
    calls = shown.pop("tool_calls", ())
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{place}.tool_calls must be a list of calls, got {short(calls)}")
    if calls:
        shown["tool_calls"] = [_call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return shown


def _text_of_part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXT_PARTS.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f'{place} must be {{"type": "text", "text": "..."}}: only text is read, got {short(part)}')
    return text


def _call(call: Any, place: str) -> dict[str, Any]:
    function = _function(call)
    if function is None:
        raise ValueError(
            f'{place} must be like {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}, '
            f"got {short(call)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise ValueError(f"{place}: arguments must be an object or its JSON text, got {short(arguments)}")
    named = {} if call.get("id") is None else {"id": call["id"]}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _object(text: str) -> Any:
    """The object that a JSON text is, which templates write as JSON themselves; another text as it is."""
    try:
        value = read_json(text.encode() or b"{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _tool(tool: Any, place: str) -> dict[str, Any]:
    function = _function(tool)
    if function is None:
        raise ValueError(
            f'{place} must be like {{"type": "function", "function": {{"name": ..., "description": ..., '
            f'"parameters": ...}}}}, got {short(tool)}'
        )
    parameters = function.get("parameters") or dict(NO_ARGUMENTS)
    if isinstance(parameters, str):
        parameters = _object(parameters)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{place}: parameters must be a JSON schema, which is an object, got {short(parameters)}")
    first = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    rest = {key: value for key, value in function.items() if value is not None and key not in (*first, "strict")}
    return {"type": "function", "function": {**first, **rest}}


def _function(value: Any) -> Mapping[str, Any] | None:
    """The function of a call or of a tool, without what is around it; None if it has none with a name."""
    if not isinstance(value, Mapping) or value.get("type", "function") not in ("function", None):
        return None
    function = value.get("function")
    if function is None:
        function = {key: one for key, one in value.items() if key not in ("type", "id")}
    return function if isinstance(function, Mapping) and isinstance(function.get("name"), str) else None
