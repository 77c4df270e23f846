"""The messages of a chat, as clients send them; fields not named here are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from strata.serve.schema.base import HistoryModel, Unsupported, discriminated_by

_TEXT_ONLY = "this server reads text only"


class TextPart(HistoryModel):
    type: Literal["text"]
    text: str


def _kind_of_content(value: Any) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")],
    discriminated_by(
        _kind_of_content, "content", 'Input should be a string or a list of {"type": "text", "text": ...}'
    ),
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


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with the fields that are known here and have a value, for `strata.text.messages`."""
    return [message.model_dump(exclude_none=True) for message in messages]
