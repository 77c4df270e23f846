"""The output items of a response, built from what a model writes, and their stream events.

The shapes of both are in `schema.responses_reply`. Events get their sequence_number when they are sent.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallStart

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class ResponseOutput:
    """items: those that are done, in their order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None

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

    def _begin(self, item: _TextItem | _CallItem) -> list[Event]:
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


class _TextItem:
    """An item that is a text, while it is written: one part, `_part`; its events are `_event` and .delta or .done."""

    _event: str

    def __init__(self, prefix: str) -> None:
        self._id = f"{prefix}_{uuid4().hex}"
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        part = self._place() | {"part": self._part("")}
        return [
            {"type": "response.output_item.added", "item": self._head("in_progress") | {"content": []}},
            {"type": "response.content_part.added"} | part,
        ]

    def more(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return {"type": f"{self._event}.delta", "delta": text} | self._place()

    def end(self, status: str) -> list[Event]:
        return [
            {"type": f"{self._event}.done", "text": "".join(self._texts)} | self._place(),
            {"type": "response.content_part.done", "part": self._part("".join(self._texts))} | self._place(),
            {"type": "response.output_item.done", "item": self.whole(status)},
        ]

    def whole(self, status: str) -> dict[str, Any]:
        return self._head(status) | {"content": [self._part("".join(self._texts))]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0}

    def _head(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class _Reasoning(_TextItem):
    _event = "response.reasoning_text"

    def __init__(self) -> None:
        super().__init__("rs")

    def _head(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "type": "reasoning", "status": status, "summary": []}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class _Message(_TextItem):
    _event = "response.output_text"

    def __init__(self) -> None:
        super().__init__("msg")
        self._logprobs: Logprobs = []

    def more(self, text: str, logprobs: Logprobs) -> Event:
        self._logprobs += logprobs
        return super().more(text, logprobs) | {"logprobs": logprobs}

    def end(self, status: str) -> list[Event]:
        done, *others = super().end(status)
        return [done | {"logprobs": self._logprobs}, *others]

    def _head(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant"}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class _CallItem:
    def __init__(self, start: ToolCallStart) -> None:
        self._id = f"fc_{uuid4().hex}"
        self._start = start
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        return [{"type": "response.output_item.added", "item": self.whole("in_progress")}]

    def more(self, text: str, logprobs: Logprobs) -> Event:
        self._arguments.append(text)
        return {"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": text}

    def end(self, status: str) -> list[Event]:
        item = self.whole(status)
        done = {"item_id": self._id, "name": item["name"], "arguments": item["arguments"]}
        return [
            {"type": "response.function_call_arguments.done"} | done,
            {"type": "response.output_item.done", "item": item},
        ]

    def whole(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }
