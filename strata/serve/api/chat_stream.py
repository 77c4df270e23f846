"""Chat completions as a stream: the chunks, written as bytes, since there is one for every token of every client.

What a chunk holds is in `schema.chat_reply.ChatChunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from strata.engine.process.messages import TokenLogprobs
from strata.serve.api.chat_reply import finish_reason
from strata.serve.api.ledger_reply import last_chunk
from strata.serve.api.logprobs import chat_logprobs
from strata.serve.generation import SampleDelta
from strata.serve.replies.reply_parser import ContentDelta, ReasoningDelta, ReplyEvent, ReplyParser, ToolCallStart
from strata.serve.schema.ledger import RequestLedgerReply
from strata.serve.schema.reply import ReplyHead, Usage
from strata.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class ChatStream:
    """Writes the events of one answer.

    parsers: one for each choice, None where all text is content. tokenizer: for the texts of log-probabilities.
    usage: gives what has been used so far, for every chunk (continuous_usage_stats); None shows no usage in them.
    with_usage: there will be a last chunk of usage, so the others say null.
    prompt_ids: reported in the first chunk, and the ids of each choice in all, unless None.
    """

    def __init__(
        self,
        head: ReplyHead,
        parsers: Sequence[ReplyParser | None],
        tokenizer: Tokenizer,
        *,
        with_usage: bool,
        usage: Callable[[], Usage] | None,
        prompt_ids: list[int] | None,
    ) -> None:
        fields = {**head.fields("chat.completion.chunk"), "service_tier": "default"}
        self._start = b"data: " + _encode(fields)[:-1]
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._usage = usage
        self._prompt_ids = prompt_ids
        self._choices = [
            _ChoiceStream(self._write, index, parser, tokenizer, prompt_ids is not None)
            for index, parser in enumerate(parsers)
        ]

    def roles(self) -> bytes:
        """The first chunk of each choice."""
        chunks = b"".join([choice.role() for choice in self._choices])
        if self._prompt_ids is None:
            return chunks
        start = self._start + b',"prompt_token_ids":' + _encode(self._prompt_ids)
        return chunks.replace(self._start, start, 1)

    def chunks(self, deltas: list[SampleDelta]) -> bytes:
        """The chunks of what has come; empty if nothing of it can be shown yet."""
        return b"".join([self._choices[delta.index].chunks(delta) for delta in deltas])

    def last(self, usage: Usage | None, ledger: RequestLedgerReply | None) -> bytes:
        """The last chunk of a stream with usage, a ledger or both; empty without."""
        return last_chunk(self._start, usage, ledger)

    def _write(self, choice: bytes) -> bytes:
        end = self._end
        if self._usage is not None:
            end = b',"usage":' + self._usage().model_dump_json().encode() + b"}\n\n"
        return b"".join((self._start, b',"choices":[', choice, b"]", end))


class _ChoiceStream:
    def __init__(
        self,
        write: Callable[[bytes], bytes],
        index: int,
        parser: ReplyParser | None,
        tokenizer: Tokenizer,
        with_ids: bool,
    ) -> None:
        self._write = write
        self._start = b'{"index":%d,"delta":' % index
        self._parser = parser
        self._tokenizer = tokenizer
        self._with_ids = with_ids
        self._called = False
        # Those of tokens whose text is held back go with the next chunk.
        self._logprobs: list[TokenLogprobs] = []
        self._ids: list[int] = []

    def role(self) -> bytes:
        return self._chunk(b'{"role":"assistant","content":""}')

    def chunks(self, delta: SampleDelta) -> bytes:
        if delta.logprobs is not None:
            self._logprobs += delta.logprobs
        if self._with_ids:
            self._ids += delta.token_ids
        if self._parser is None:
            chunks = self._chunk(b'{"content":%b}' % _encode(delta.text)) if delta.text else b""
        else:
            chunks = self._parsed(self._parser, delta)
        return chunks if delta.finish_reason is None else chunks + self._last(delta)

    def _parsed(self, parser: ReplyParser, delta: SampleDelta) -> bytes:
        events = parser.append(delta.text)
        if delta.finish_reason is not None:
            events += parser.finish()
        self._called = self._called or any(isinstance(event, ToolCallStart) for event in events)
        return b"".join([self._chunk(_encode(_delta(event))) for event in events])

    def _last(self, delta: SampleDelta) -> bytes:
        assert delta.finish_reason is not None
        reason = _encode(finish_reason(delta.finish_reason, self._called))
        return self._chunk(b"{}", reason + b',"stop_reason":' + _encode(delta.stop_reason))

    def _chunk(self, delta: bytes, finish: bytes = b"null") -> bytes:
        logprobs, ids = b"null", b""
        if self._logprobs:
            logprobs = _encode({"content": chat_logprobs(self._tokenizer, self._logprobs), "refusal": None})
            self._logprobs.clear()
        if self._with_ids:
            ids = b',"token_ids":' + _encode(self._ids)
            self._ids.clear()
        return self._write(
            b"".join((self._start, delta, b',"logprobs":', logprobs, b',"finish_reason":', finish, ids, b"}"))
        )


def _delta(event: ReplyEvent) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
