"""What chat completions answer with: one object, or the chunks of a stream."""

from __future__ import annotations

from typing import Literal

from strata.serve.schema.base import ReplyModel
from strata.serve.schema.reply import AnswerModel, Usage

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token, its natural log-probability (-9999 where it is none), and the likeliest tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ReplyModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(ReplyModel):
    name: str
    arguments: str


class ToolCallReply(ReplyModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantReply(ReplyModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    """What the model thought before it answered, if the server splits that off."""
    tool_calls: list[ToolCallReply] | None = None


class ChoiceModel(ReplyModel):
    index: int
    logprobs: ChoiceLogprobs | None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; null for the model's own end of sequence."""
    token_ids: list[int] | None = None


class ChatChoice(ChoiceModel):
    message: AssistantReply
    finish_reason: FinishReason


class ChatAnswerModel(AnswerModel):
    service_tier: Literal["default"]
    prompt_token_ids: list[int] | None = None


class ChatCompletion(ChatAnswerModel):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionCallDelta(ReplyModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(ReplyModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class AssistantDelta(ReplyModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceModel):
    delta: AssistantDelta
    finish_reason: FinishReason | None


class ChatChunk(ChatAnswerModel):
    """`usage` is there with stream_options.include_usage only: null but in the last chunk, which has no choices and,
    if that was asked for, the ledger."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
