"""The messages of a chat, as clients send them and as chat templates take them; fields not named here are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from strata.serve.http.json_route import read_json
from strata.serve.schema.base import HistoryModel, Unsupported, told_apart

_TEXT_ONLY = "this server reads text only"


class TextPart(HistoryModel):
    type: Literal["text"]
    text: str


def _kind_of_content(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Field(min_length=1), Tag("parts")],
    told_apart(_kind_of_content, "content", 'Input should be a string or a list of {"type": "text", "text": ...}'),
]


class SystemMessage(HistoryModel):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(HistoryModel):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(HistoryModel):
    name: str
    arguments: str
    """JSON text."""


class MessageToolCall(HistoryModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(HistoryModel):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    """What the model thought before it answered; templates decide whether it is shown again."""
    tool_calls: list[MessageToolCall] | None = None
    refusal: str | None = None
    """Taken as the content if there is none."""
    name: str | None = None
    audio: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    function_call: Annotated[Any, Unsupported("use tool_calls")] = None


class ToolMessage(HistoryModel):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates know it: content one string, "developer" as "system", arguments as an object."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    shown["content"] = _text_of(message.content)
    if message.name is not None:
        shown["name"] = message.name
    if isinstance(message, ToolMessage):
        shown["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        shown["content"] = shown["content"] or message.refusal or ""
        if message.reasoning_content is not None:
            shown["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            shown["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    return shown


def _text_of(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _call_for_template(call: MessageToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves; what the model once wrote wrongly is shown to it as it was."""
    try:
        value = read_json(text.encode() or b"{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
