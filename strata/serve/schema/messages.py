"""The messages of a chat, as clients send them, of which fields not named here are ignored; how they are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from strata.serve.http.errors import ApiError
from strata.serve.schema.base import HistoryModel, RequestModel, Unsupported, text_or
from strata.text.chat_template import NO_VARIABLES, ChatOptions

_TEXT_ONLY = "this server reads text only"


class TextPart(HistoryModel):
    type: Literal["text"]
    text: str


class RefusalPart(HistoryModel):
    type: Literal["refusal"]
    refusal: str


_BY_CONTENT = text_or("parts", "content", 'Input should be a string or a list of {"type": "text", "text": ...}')
Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")], _BY_CONTENT]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
AssistantContent = Annotated[Annotated[str, Tag("text")] | Annotated[list[AssistantPart], Tag("parts")], _BY_CONTENT]


def _text_or_nothing(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# What others than this server call reasoning, where it is a text; some have objects of their own by such a name.
ForeignReasoning = Annotated[str | None, BeforeValidator(_text_or_nothing)]


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
    content: AssistantContent | None = None
    reasoning_content: str | None = None
    """What the model thought before it answered; templates decide whether it is shown again."""
    thinking: ForeignReasoning = None
    """Taken as the reasoning_content if there is none, and so is what follows."""
    reasoning: ForeignReasoning = None
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


class TemplateFields(RequestModel):
    add_generation_prompt: bool | None = None
    """Open the assistant's answer after the messages; the default. (This and what follows are vLLM's extensions.)"""
    continue_final_message: bool | None = None
    """Leave the last message open instead, to be written on."""
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(json_schema_extra={"propertyNames": {"not": {"enum": list(NO_VARIABLES)}}})]
        | None
    ) = None
    """Variables for the chat template, such as `enable_thinking`; one that the template does not read has no effect."""
    parse_special_tokens: bool | None = None
    """Special tokens that messages spell become those tokens; by default they are text. (An extension of our own.)"""

    def check_template(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message leaves the last message open: leave out add_generation_prompt",
                param="add_generation_prompt",
            )
        for name in self.chat_template_kwargs or ():
            if name in NO_VARIABLES:
                where = f"chat_template_kwargs.{name}"
                raise ApiError(400, f"{where}: this is no variable that a request can set there", param=where)

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    def rendering(self, tools: Sequence[dict[str, Any]] | None) -> ChatOptions:
        """What the chat template is told besides the messages."""
        return {
            "add_generation_prompt": not self.continue_final_message and self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "tools": tools,
            "variables": self.template_variables,
            "parse_special_tokens": bool(self.parse_special_tokens),
        }
