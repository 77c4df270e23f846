"""What /v1/responses answers with: one object, or the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from strata.serve.schema.base import ReplyModel
from strata.serve.schema.chat_reply import TokenLogprob
from strata.serve.schema.responses import Status


class OutputText(ReplyModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(ReplyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputFunctionCall(ReplyModel):
    """arguments: JSON text, as the model wrote it. call_id: what the output of the call must name."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningText(ReplyModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ReplyModel):
    """What the model thought before it answered, if the server splits that off."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[ReasoningText]
    content: list[ReasoningText]


class InputTokensDetails(ReplyModel):
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    cache_write_tokens: int
    """Always 0: nothing is charged for what is put into the prefix cache."""


class OutputTokensDetails(ReplyModel):
    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(ReplyModel):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(ReplyModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(ReplyModel):
    """`created_at` and `completed_at` are Unix times, in seconds; what the request asked for is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    usage: ResponseUsage | None
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any] | None
    service_tier: Literal["default"]
    store: bool
    """Whether it can be asked for again."""
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseStreamEvent(ReplyModel):
    """An event of a stream; what else it holds depends on its type, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int


class DeletedResponse(ReplyModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
