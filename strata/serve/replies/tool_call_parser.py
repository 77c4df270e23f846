"""Finds tool calls in a text that comes piece by piece, and passes their arguments on as they come."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator
from contextlib import suppress

from strata.serve.replies.json_reader import Advancing, JsonReader, Reading, is_json_object
from strata.serve.replies.reply_events import ContentDelta, ReplyEvent, ToolCallArguments, ToolCallStart, merged
from strata.serve.replies.tool_formats import FUNCTION_NAME, ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = ("name", "id", "type", *_ARGUMENTS)


class ToolCallParser:
    """Splits a reply into content and tool calls, the same whatever pieces it comes in.

    What may become a call is held back. It is one as soon as its name and the brace that opens its arguments are there;
    from then on its arguments are passed on as they come. What does not become a call is content, to the last
    character. Should a call break later, as when a reply is cut off, it keeps the arguments that were passed on (always
    the beginning of valid JSON), and what follows is content. White space next to a call is left out.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._events: list[ReplyEvent] = []
        self._calls = 0
        self._held: list[str] = []
        self._take: Callable[[str], None] = self._held.append
        self._json = JsonReader(lambda character: self._take(character))
        self._call = _Call()
        self._reading = self._read()
        next(self._reading)

    def append(self, text: str) -> list[ReplyEvent]:
        for character in text:
            self._reading.send(character)
        return self._take_events()

    def finish(self) -> list[ReplyEvent]:
        """What was held back, when the reply is at its end."""
        with suppress(StopIteration):
            self._reading.send("")
        return self._take_events()

    def _take_events(self) -> list[ReplyEvent]:
        events, self._events = merged(self._events), []
        return events

    def _read(self) -> Generator[None, str, None]:
        self._json.current = yield
        if self._format.opening_optional:
            yield from self._json.space()
            if self._json.current == "{":
                yield from self._read_calls()
        while self._json.current:
            if self._json.current == self._format.opening[0]:
                if (yield from self._json.expect(self._format.opening)):
                    yield from self._read_calls()
                else:
                    self._release()
            elif self._json.current.isspace():
                yield from self._json.advance()
            else:
                self._held.append(self._json.current)
                self._release()  # before the next character is waited for
                self._json.current = yield
        self._release()

    def _read_calls(self) -> Advancing:
        """Calls, as far as one follows another without an opening."""
        while (yield from self._read_call()):
            yield from self._skip_space()
            if not (yield from self._json.expect(self._format.closing or self._format.separator)):
                break
            if not self._format.separator:
                self._held.clear()
                yield from self._skip_space()
                break
        self._release()

    def _read_call(self) -> Reading:
        """Whether a whole call was there."""
        self._call = _Call()
        yield from self._json.space()
        if not (yield from self._json.elements("{", self._read_member, "}", 1)):
            return False
        if not self._call.started and not self._start_whole():
            return False
        self._held.clear()
        return True

    def _read_member(self, depth: int) -> Reading:
        start = len(self._held)
        if not (yield from self._json.string()):
            return False
        key = json.loads(self._held_since(start))
        if key not in _MEMBERS or not (yield from self._json.colon()):
            return False
        if key in _ARGUMENTS and self._call.name and not self._call.started and self._json.current == "{":
            return (yield from self._pass_arguments(depth))
        start = len(self._held)
        if not (yield from self._json.value(depth)):
            return False
        text = self._held_since(start)
        if key == "name":
            self._call.name = json.loads(text) if text.startswith('"') else ""
            return FUNCTION_NAME.fullmatch(self._call.name) is not None
        if key in _ARGUMENTS:
            self._call.arguments = text
        return True

    def _pass_arguments(self, depth: int) -> Reading:
        index = self._start()
        self._held.clear()
        self._take = lambda character: self._events.append(ToolCallArguments(index, character))
        whole = yield from self._json.value(depth)
        self._take = self._held.append
        return whole

    def _start_whole(self) -> bool:
        """Start a call all of which has been read, since its arguments came before its name or in a string."""
        arguments = _arguments_text(self._call.arguments)
        if not self._call.name or arguments is None:
            return False
        self._events.append(ToolCallArguments(self._start(), arguments))
        return True

    def _start(self) -> int:
        index = self._calls
        self._calls += 1
        self._call.started = True
        self._events.append(ToolCallStart(index, f"call_{secrets.token_hex(12)}", self._call.name))
        return index

    def _skip_space(self) -> Advancing:
        while self._json.current.isspace():
            yield from self._json.advance()
        self._held.clear()

    def _held_since(self, start: int) -> str:
        return "".join(self._held[start:])

    def _release(self) -> None:
        """What was held back is content after all."""
        if self._held:
            self._events.append(ContentDelta("".join(self._held)))
            self._held.clear()


class _Call:
    """What is known of the call that is being read. arguments: their JSON text, if it was held back."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments = ""
        self.started = False


def _arguments_text(text: str) -> str | None:
    """Arguments as the JSON text of an object; some models write that into a string. None if they are no object."""
    text = json.loads(text) if text.startswith('"') else text
    return text if is_json_object(text) else None
