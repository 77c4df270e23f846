"""The choices of chat completions: whole, or as bytes, chunk by chunk (see `schema.chat_reply`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from strata.engine.process.messages import TokenLogprobs
from strata.serve.api.answer import AnswerWriter
from strata.serve.api.logprobs import chat_logprobs
from strata.serve.generation import SampleDelta
from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallStart
from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


def whole_choice(
    index: int, deltas: Sequence[SampleDelta], parser: ReplyParser, tokenizer: Tokenizer, with_ids: bool
) -> dict[str, Any]:
    """A choice of all that its sample has brought. tokenizer: for the texts of log-probabilities. with_ids: report the
    token ids."""
    reply = collect(parser.append("".join(delta.text for delta in deltas)) + parser.finish())
    calls = [call.as_sent() for call in reply.tool_calls]
    said = reply.content or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    reported = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(tokenizer, [one for some in reported for one in some]) if reported else None,
        "finish_reason": _finish_reason(deltas[-1], bool(calls)),
        "stop_reason": deltas[-1].stop_reason,
    }
    return choice | {"token_ids": [id for delta in deltas for id in delta.token_ids]} if with_ids else choice


class ChoiceStream:
    """One choice of a stream. Parameters as of `whole_choice`."""

    def __init__(
        self, answer: AnswerWriter, index: int, parser: ReplyParser, tokenizer: Tokenizer, with_ids: bool
    ) -> None:
        self.index = index
        self._answer = answer
        self._start = b'{"index":%d,"delta":' % index
        self._parser = parser
        self._tokenizer = tokenizer
        self._with_ids = with_ids
        self._called = False
        # Those of tokens whose text is held back go with the next chunk.
        self._logprobs: list[TokenLogprobs] = []
        self._ids: list[int] = []

    def role(self, prompt_ids: list[int] | None) -> bytes:
        """The first chunk, in which the ids of the prompt are reported, unless None."""
        fields = b"" if prompt_ids is None else b',"prompt_token_ids":' + _encode(prompt_ids)
        return self._chunk(b'{"role":"assistant","content":""}', fields=fields)

    def chunks(self, delta: SampleDelta) -> bytes:
        """The chunks of what has come; empty if nothing of it can be shown yet."""
        if delta.logprobs is not None:
            self._logprobs += delta.logprobs
        if self._with_ids:
            self._ids += delta.token_ids
        if self._parser.splits:
            chunks = self._parsed(delta)
        else:
            chunks = self._chunk(b'{"content":%b}' % _encode(delta.text)) if delta.text else b""
        if delta.finish_reason is None:
            return chunks
        reason = _encode(_finish_reason(delta, self._called))
        return chunks + self._chunk(b"{}", reason + b',"stop_reason":' + _encode(delta.stop_reason))

    def _parsed(self, delta: SampleDelta) -> bytes:
        events = self._parser.append(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        self._called = self._called or any(isinstance(event, ToolCallStart) for event in events)
        return b"".join([self._chunk(_encode(_delta(event))) for event in events])

    def _chunk(self, delta: bytes, finish: bytes = b"null", fields: bytes = b"") -> bytes:
        logprobs, ids = b"null", b""
        if self._logprobs:
            logprobs = _encode(_logprobs(self._tokenizer, self._logprobs))
            self._logprobs.clear()
        if self._with_ids:
            ids = b',"token_ids":' + _encode(self._ids)
            self._ids.clear()
        choice = b"".join((self._start, delta, b',"logprobs":', logprobs, b',"finish_reason":', finish, ids, b"}"))
        return self._answer.chunk(choice, fields)


def _logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs]) -> dict[str, Any]:
    return {"content": chat_logprobs(tokenizer, entries), "refusal": None}


def _finish_reason(delta: SampleDelta, called: bool) -> str | None:
    """OpenAI's name for why a choice ended with its last delta. called: it holds tool calls."""
    return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


def _delta(event: ReplyEvent) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
