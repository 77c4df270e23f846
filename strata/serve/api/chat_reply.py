"""Whole answers of chat completions, gathered from what their samples bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from strata.engine.process.messages import TokenLogprobs
from strata.serve.api.logprobs import chat_logprobs
from strata.serve.generation import SampleDelta
from strata.serve.replies.reply_parser import Reply, ReplyParser, collect
from strata.serve.schema.chat_reply import (
    AssistantReply,
    ChatChoice,
    ChatCompletion,
    ChoiceLogprobs,
    FinishReason,
    FunctionCall,
    ToolCallReply,
)
from strata.serve.schema.reply import ReplyHead, Usage
from strata.text.tokenizer import Tokenizer


class ChatReply:
    """parsers: one for each choice, None where all text is content. tokenizer: for the texts of log-probabilities."""

    def __init__(self, parsers: Sequence[ReplyParser | None], tokenizer: Tokenizer) -> None:
        self._choices = [_Choice(index, parser, tokenizer) for index, parser in enumerate(parsers)]

    def take(self, deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            self._choices[delta.index].take(delta)

    def completion(self, head: ReplyHead, usage: Usage, prompt_ids: list[int] | None) -> ChatCompletion:
        """The answer. prompt_ids: reported, together with the ids of each choice, unless None."""
        completion = ChatCompletion(
            **head.fields("chat.completion"),
            choices=[choice.finished(prompt_ids is not None) for choice in self._choices],
            usage=usage,
            service_tier="default",
        )
        if prompt_ids is not None:
            completion.prompt_token_ids = prompt_ids
        return completion


class _Choice:
    def __init__(self, index: int, parser: ReplyParser | None, tokenizer: Tokenizer) -> None:
        self._index = index
        self._parser = parser
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._reason = "stop"
        self._stop_reason: int | str | None = None

    def take(self, delta: SampleDelta) -> None:
        self._text.append(delta.text)
        self._ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self._reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    def finished(self, with_ids: bool) -> ChatChoice:
        text = "".join(self._text)
        parser = self._parser
        reply = Reply(text, "", []) if parser is None else collect(parser.append(text) + parser.finish())
        logprobs = None
        if self._logprobs is not None:
            logprobs = ChoiceLogprobs.model_validate(
                {"content": chat_logprobs(self._tokenizer, self._logprobs), "refusal": None}
            )
        choice = ChatChoice(
            index=self._index,
            message=_message(reply),
            logprobs=logprobs,
            finish_reason=finish_reason(self._reason, bool(reply.tool_calls)),
            stop_reason=self._stop_reason,
        )
        if with_ids:
            choice.token_ids = self._ids
        return choice


def finish_reason(reason: str, called: bool) -> FinishReason:
    """OpenAI's name for why a choice ended. called: it holds tool calls."""
    return "tool_calls" if called and reason == "stop" else cast(Literal["stop", "length"], reason)


def _message(reply: Reply) -> AssistantReply:
    calls = [
        ToolCallReply(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in reply.tool_calls
    ]
    message = AssistantReply(role="assistant", content=reply.content or (None if calls else ""), refusal=None)
    if reply.reasoning:
        message.reasoning_content = reply.reasoning
    if calls:
        message.tool_calls = calls
    return message
