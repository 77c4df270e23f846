"""What a model writes, split into reasoning, content and tool calls: piece by piece or whole, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.engine.sampling_params import SamplingParams
from strata.serve.replies.reasoning import CLOSING, OPENING, ReasoningSplitter
from strata.serve.replies.reply_events import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from strata.serve.replies.tool_call_parser import ToolCallParser
from strata.serve.replies.tool_formats import TOOL_FORMATS
from strata.text.tokenizer import Tokenizer


class ReplyParser:
    """Splits one reply; joined, its events do not depend on the pieces that the text came in.

    tool_format: how the model writes tool calls ("hermes", "llama3"); None if it was offered no tools.
    reasoning: the reply may begin with <think>...</think>.
    in_reasoning: the prompt has opened that tag (`reasoning.opens_reasoning(prompt)`).
    parallel: may the reply hold several calls; if not, those after the first are left out.
    splits: there may be more in it than content.
    """

    def __init__(
        self, tool_format: str | None, reasoning: bool, *, in_reasoning: bool = False, parallel: bool = True
    ) -> None:
        self._splitter = ReasoningSplitter(in_reasoning) if reasoning else None
        self._tools = ToolCallParser(TOOL_FORMATS[tool_format]) if tool_format else None
        self._parallel = parallel
        self.splits = reasoning or tool_format is not None

    def append(self, text: str) -> list[ReplyEvent]:
        """What this piece of the reply brings; empty while it cannot be told yet."""
        if not text:
            return []
        return self._split_calls(self._splitter.append(text) if self._splitter else [ContentDelta(text)])

    def finish(self) -> list[ReplyEvent]:
        """What was held back, when the reply is at its end."""
        events = self._split_calls(self._splitter.finish() if self._splitter else [])
        return merged(events + self._allowed(self._tools.finish())) if self._tools else events

    def _split_calls(self, parts: Sequence[ContentDelta | ReasoningDelta]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for part in parts:
            if self._tools and isinstance(part, ContentDelta):
                events += self._allowed(self._tools.append(part.text))
            else:
                events.append(part)
        return events

    def _allowed(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        if self._parallel:
            return events
        return [event for event in events if isinstance(event, (ContentDelta, ReasoningDelta)) or event.index == 0]


def with_visible_tags(
    params: SamplingParams, tokenizer: Tokenizer, tool_format: str | None, reasoning: bool
) -> SamplingParams:
    """The parameters with which the text holds the tags that the parser looks for.

    Some tokenizers make special tokens of them, which the text would leave out.
    """
    tags = [OPENING, CLOSING] if reasoning else []
    if tool_format is not None:
        tags += [TOOL_FORMATS[tool_format].opening, TOOL_FORMATS[tool_format].closing]
    hidden = any(tokenizer.id(tag) in tokenizer.special_ids for tag in tags)
    return replace(params, skip_special_tokens=False) if hidden else params


@dataclass
class ToolCall:
    """arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""

    def as_sent(self) -> dict[str, Any]:
        """As messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Reply:
    """A whole reply; content and reasoning are empty if there is none."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


def collect(events: list[ReplyEvent]) -> Reply:
    """What all events of a reply add up to."""
    reply = Reply("", "", [])
    for event in merged(events):
        if isinstance(event, ToolCallStart):
            reply.tool_calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            reply.tool_calls[event.index].arguments += event.text
        elif isinstance(event, ContentDelta):
            reply.content += event.text
        else:
            reply.reasoning += event.text
    return reply
