"""One response while it is generated: its object, and the bytes of its stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from strata.serve.api.logprobs import chat_logprobs
from strata.serve.api.response_output import Event, ResponseOutput
from strata.serve.generation import Generation, SampleDelta
from strata.serve.http.errors import ApiError
from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta, ReplyEvent
from strata.serve.replies.reply_parser import ReplyParser
from strata.text.tokenizer import Tokenizer


class ResponseInProgress:
    """Takes the deltas of a generation and gives the events that they bring.

    body: the response object (`schema.responses_reply.ResponseObject`) as far as it is.
    reply: all that the model has written, as the parts that were recognised in it.
    """

    def __init__(self, body: dict[str, Any], parser: ReplyParser, tokenizer: Tokenizer) -> None:
        self.body = body
        self.reply: list[ReplyEvent] = []
        self._parser = parser
        self._tokenizer = tokenizer
        self._output = ResponseOutput()
        self._logprobs: list[dict[str, Any]] = []
        self._tokens = 0
        self._reasoning_tokens = 0

    def begin(self) -> list[Event]:
        return [{"type": kind, "response": self.body.copy()} for kind in ("response.created", "response.in_progress")]

    def take(self, delta: SampleDelta) -> list[Event]:
        self._tokens += len(delta.token_ids)
        self._logprobs += chat_logprobs(self._tokenizer, delta.logprobs or ())
        events = self._events_of(self._parser.append(delta.text))
        if delta.finish_reason is None:
            return events
        complete = delta.finish_reason == "stop"
        self.body["status"] = "completed" if complete else "incomplete"
        if not complete:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        return events + self._events_of(self._parser.finish()) + self._output.finish(complete)

    def finish(self, generation: Generation) -> None:
        """Complete the response object, after the last delta."""
        self.body["output"] = self._output.items
        self.body["usage"] = self._usage(generation)
        if self.body["status"] == "completed":
            self.body["completed_at"] = int(time.time())

    def end(self) -> list[Event]:
        """The last event of a stream that did not fail."""
        return [{"type": f"response.{self.body['status']}", "response": self.body}]

    def fail(self, error: ApiError) -> list[Event]:
        """The last events of a stream that failed. Clients raise at an `error`, and only there."""
        self.body["status"] = "failed"
        self.body["output"] = self._output.items
        self.body["error"] = {"code": "server_error", "message": error.message}
        detail = error.body()["error"]
        failure = {"type": "error", "code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return [{"type": "response.failed", "response": self.body}, failure | {"error": detail}]

    def _events_of(self, events: list[ReplyEvent]) -> list[Event]:
        self.reply += events
        made: list[Event] = []
        for event in events:
            made += self._output.take(event, self._logprobs if isinstance(event, ContentDelta) else [])
            # What came before an event belongs to it: those of held back text, of tags and of white space.
            self._logprobs = []
            self._reasoning_tokens += self._tokens if isinstance(event, ReasoningDelta) else 0
            self._tokens = 0
        return made

    def _usage(self, generation: Generation) -> dict[str, Any]:
        prompt, output = generation.prompt_tokens, generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": prompt + output,
        }


class EventWriter:
    """Numbers the events of one stream and writes them as server-sent events."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, events: Iterable[Event]) -> bytes:
        written = []
        for event in events:
            body = msgspec.json.encode(event | {"sequence_number": self._next})
            written.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), body))
            self._next += 1
        return b"".join(written)
