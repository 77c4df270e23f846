"""The body of a /v1/responses request: every field of OpenAI's API, taken or refused, and some of vLLM's extensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, Tag

from strata.serve.http.errors import ApiError
from strata.serve.schema.base import HistoryModel, RequestModel, Unsupported, described_as, discriminated_by, text_or
from strata.serve.schema.chat import MAX_TOOLS, DialogueFields, Function, FunctionName, ReasoningEffort, Verbosity
from strata.serve.schema.messages import RefusalPart
from strata.serve.schema.sampling import Count
from strata.serve.schema.structured import JsonObjectFormat, NamedSchema, TextFormat

LOGPROBS = "message.output_text.logprobs"

_TEXT_ONLY = "this server reads and writes text only"
_NOT_STORED = "only responses are stored here; use previous_response_id"

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Status = Literal["in_progress", "completed", "incomplete"]


class ResponsesTextPart(HistoryModel):
    type: Literal["input_text", "output_text"]
    text: str


Content = Annotated[
    str | list[ResponsesTextPart | RefusalPart],
    described_as('a string or a list of {"type": "input_text" or "output_text", "text": ...}'),
]


class MessageItem(HistoryModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(HistoryModel):
    type: Literal["function_call"]
    call_id: Annotated[str, StringConstraints(min_length=1)]
    name: str
    arguments: str
    """JSON text."""


class FunctionCallOutputItem(HistoryModel):
    type: Literal["function_call_output"]
    call_id: Annotated[str, StringConstraints(min_length=1)]
    output: Content


class ReasoningPart(HistoryModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(HistoryModel):
    """What the model thought before the next message or call; templates decide whether it is shown again."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] | None = None
    """Taken if there is no content."""


def _kind_of_item(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    discriminated_by(
        _kind_of_item, "item", "Input should be a message, function_call, function_call_output or reasoning item"
    ),
]
Items = Annotated[list[Item], Field(min_length=1)]


class _FunctionKind(RequestModel):
    type: Literal["function"]


class FunctionTool(Function, _FunctionKind):
    """`type` is its first field, so a tool of another type is reported as that, not as one without a name."""


class ResponsesNamedTool(RequestModel):
    type: Literal["function"]
    name: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ResponsesNamedTool,
    described_as('"none", "auto", "required" or {"type": "function", "name": ...}'),
]


class ResponsesSchemaFormat(NamedSchema):
    type: Literal["json_schema"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]


class TextConfig(RequestModel):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None
    """What the answer must be: text, a JSON object, or JSON that follows a schema."""
    verbosity: Verbosity | None = None
    """Has no effect: models here take no such setting; say it in the instructions."""


class ReasoningConfig(RequestModel):
    effort: ReasoningEffort | None = None
    """A variable `reasoning_effort` for the chat template, which decides what comes of it; most have no use for it."""
    summary: Annotated[Any, Unsupported("reasoning is sent whole, in content", "auto")] = None
    generate_summary: Annotated[Any, Unsupported("reasoning is sent whole, in content", "auto")] = None


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: Annotated[Any, Unsupported("events are not padded", False)] = None


class ResponsesRequest(DialogueFields):
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[Items, Tag("items")],
        text_or("items", "input", "Input should be a string or a list of items"),
    ]
    """What the user says, or items: messages, calls, their outputs, reasoning."""
    instructions: str | None = None
    """A system message before all others; it is not carried over by previous_response_id."""
    previous_response_id: str | None = None
    """Go on from this response: its conversation stands before the input."""
    store: bool | None = None
    """Keep the response, for GET and previous_response_id; the default."""
    max_output_tokens: Count | None = None
    """The most tokens to generate; absent, as many as the model has room for."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """May it call them (auto, the default), must it (required, or a named one), or not (none)."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto drops the oldest messages of a conversation that does not fit the model; disabled, the default, refuses."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """To report besides: the log-probability of each token of messages. Reasoning is sent in any case, readable."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    """Kept with the response."""
    stream_options: ResponsesStreamOptions | None = None
    """Only with stream."""

    background: Annotated[Any, Unsupported("ask without it, or with stream", False)] = None
    conversation: Annotated[Any, Unsupported(_NOT_STORED)] = None
    prompt: Annotated[Any, Unsupported("prompts are not stored here; send the text")] = None
    max_tool_calls: Annotated[Any, Unsupported("it bounds built-in tools, and there are none here")] = None
    context_management: Annotated[Any, Unsupported("use truncation")] = None
    access_programs: Annotated[Any, Unsupported("there are none here")] = None
    image: Annotated[Any, Unsupported(_TEXT_ONLY)] = None

    @property
    def offered(self) -> Sequence[Function]:
        """Its tools."""
        return self.tools or ()

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reported_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = None if self.reasoning is None else self.reasoning.effort
        return {} if effort is None else {"reasoning_effort": effort}

    def check(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for requests with stream: true", param="stream_options")
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
