"""The parts that a reply comes in: text, reasoning and tool calls, as they are recognised in what the model writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class ContentDelta:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model calls a function. index: which call of the reply this is, from 0. id: names the call to the client."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ReplyEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merged(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """The same events with the texts of neighbours of one kind joined."""
    joined: list[ReplyEvent] = []
    for _, run in groupby(events, _kind):
        first, *others = run
        if isinstance(first, ToolCallStart):
            joined += [first, *others]
        else:
            texts = [event.text for event in others if not isinstance(event, ToolCallStart)]
            joined.append(replace(first, text="".join([first.text, *texts])))
    return joined


def _kind(event: ReplyEvent) -> tuple[type[ReplyEvent], int]:
    return type(event), event.index if isinstance(event, ToolCallArguments) else 0
