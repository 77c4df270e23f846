"""One response while it is generated: its object, its output items, and the bytes of its stream of events.

The shapes of all are in `schema.responses_reply`. Events get their sequence_number when they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar
from uuid import uuid4

import msgspec

from strata.serve.api.logprobs import chat_logprobs
from strata.serve.generation import Generation, SampleDelta
from strata.serve.http.errors import ApiError
from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallStart
from strata.serve.replies.reply_parser import ReplyParser
from strata.text.tokenizer import Tokenizer

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


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


class ResponseOutput:
    """items: those that are done, in their order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: _Item | None = None

    def take(self, event: ReplyEvent, logprobs: Logprobs) -> list[Event]:
        """What this part of the reply brings. logprobs: of the tokens of a content delta."""
        events: list[Event] = []
        if isinstance(event, ToolCallStart):
            return self._begin(_CallItem(event))
        if isinstance(event, ContentDelta) and not isinstance(self._open, _Message):
            events = self._begin(_Message())
        if isinstance(event, ReasoningDelta) and not isinstance(self._open, _Reasoning):
            events = self._begin(_Reasoning())
        assert self._open is not None, "arguments come after the start of their call"
        return events + self._placed([self._open.more(event.text, logprobs)])

    def finish(self, complete: bool) -> list[Event]:
        """The reply is at its end; a reply of nothing is an empty message. complete: it was not cut off."""
        events = [] if self.items or self._open else self._begin(_Message())
        return events + self._end("completed" if complete else "incomplete")

    def _begin(self, item: _Item) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return events + self._placed(item.begin())

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._placed(self._open.end(status))
        self.items.append(self._open.whole(status))
        self._open = None
        return events

    def _placed(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["output_index"] = len(self.items)
        return events


class _Item:
    """An output item, while it is written: its text comes by the events `_event`.delta and .done."""

    _prefix: str
    _event: str

    def __init__(self) -> None:
        self._id = f"{self._prefix}_{uuid4().hex}"
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [{"type": "response.output_item.added", "item": self.whole("in_progress")}]

    def more(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return {"type": f"{self._event}.delta", "delta": text} | self._place()

    def end(self, status: str) -> list[Event]:
        done = {"type": f"{self._event}.done"} | self._done() | self._place()
        return [done, {"type": "response.output_item.done", "item": self.whole(status)}]

    def whole(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def _done(self) -> dict[str, Any]:
        raise NotImplementedError

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id}


class _TextItem(_Item):
    """One of a content of one part, `_part`. _fields: of the item, besides its id, its status and its content."""

    _fields: ClassVar[dict[str, Any]]

    def begin(self) -> list[Event]:
        (added,) = super().begin()
        added["item"]["content"] = []
        return [added, {"type": "response.content_part.added", "part": self._part()} | self._place()]

    def end(self, status: str) -> list[Event]:
        done, item = super().end(status)
        return [done, {"type": "response.content_part.done", "part": self._part()} | self._place(), item]

    def whole(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "status": status, **self._fields, "content": [self._part()]}

    def _done(self) -> dict[str, Any]:
        return {"text": "".join(self._texts)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        raise NotImplementedError


class _Reasoning(_TextItem):
    _prefix, _event = "rs", "response.reasoning_text"
    _fields: ClassVar = {"type": "reasoning", "summary": []}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text"} | self._done()


class _Message(_TextItem):
    _prefix, _event = "msg", "response.output_text"
    _fields: ClassVar = {"type": "message", "role": "assistant"}

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: Logprobs = []

    def more(self, text: str, logprobs: Logprobs) -> Event:
        self._logprobs += logprobs
        return super().more(text, logprobs) | {"logprobs": logprobs}

    def _done(self) -> dict[str, Any]:
        return super()._done() | {"logprobs": list(self._logprobs)}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "annotations": []} | self._done()


class _CallItem(_Item):
    _prefix, _event = "fc", "response.function_call_arguments"

    def __init__(self, start: ToolCallStart) -> None:
        super().__init__()
        self._start = start

    def whole(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "type": "function_call", "status": status, "call_id": self._start.id}
        return head | self._done()

    def _done(self) -> dict[str, Any]:
        return {"name": self._start.name, "arguments": "".join(self._texts)}
