"""JSON (RFC 8259) read one character at a time: at each it is known whether the text can still become valid.

Each method is a coroutine: it yields when it needs the next character, which is sent to it ("" when no more will come),
and returns whether what it looked for was there. It starts at its first character and ends at the one after its last.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

Reading = Generator[None, str, bool]
Advancing = Generator[None, str, None]

# Deeper values would end in RecursionError when a client reads them.
MAX_DEPTH = 64

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonReader:
    """current: the character to be read next. accept: called with each character that has been read."""

    def __init__(self, accept: Callable[[str], None]) -> None:
        self.current = ""
        self._accept = accept

    def advance(self) -> Advancing:
        """Read the current character."""
        self._accept(self.current)
        self.current = yield

    def expect(self, text: str) -> Reading:
        for character in text:
            if self.current != character:
                return False
            yield from self.advance()
        return True

    def space(self) -> Advancing:
        while self.current in _SPACE:
            yield from self.advance()

    def value(self, depth: int = 0) -> Reading:
        if self.current == '"':
            return (yield from self.string())
        if self.current == "{":
            return (yield from self.elements("{", self._member, "}", depth + 1))
        if self.current == "[":
            return (yield from self.elements("[", self.value, "]", depth + 1))
        if word := _WORDS.get(self.current):
            return (yield from self.expect(word))
        return (yield from self._number())

    def string(self) -> Reading:
        if not (yield from self.expect('"')):
            return False
        while self.current != '"':
            # A control character, the end of the text, or half a character.
            if self.current < " " or "\ud800" <= self.current <= "\udfff":
                return False
            if self.current == "\\":
                if not (yield from self._escape()):
                    return False
            else:
                yield from self.advance()
        return (yield from self.expect('"'))

    def colon(self) -> Reading:
        yield from self.space()
        if not (yield from self.expect(":")):
            return False
        yield from self.space()
        return True

    def elements(self, start: str, element: Callable[[int], Reading], end: str, depth: int) -> Reading:
        """`start`, elements with commas between them, `end`. depth: of the object or array that this is, from 1."""
        if depth > MAX_DEPTH or not (yield from self.expect(start)):
            return False
        yield from self.space()
        if self.current == end:
            return (yield from self.expect(end))
        while True:
            if not (yield from element(depth)):
                return False
            yield from self.space()
            if self.current == end:
                return (yield from self.expect(end))
            if not (yield from self.expect(",")):
                return False
            yield from self.space()

    def whole_object(self) -> Reading:
        """An object with nothing but white space around it, read from before its first character."""
        self.current = yield
        yield from self.space()
        if self.current != "{" or not (yield from self.value()):
            return False
        yield from self.space()
        return not self.current

    def _member(self, depth: int) -> Reading:
        return (yield from self.string()) and (yield from self.colon()) and (yield from self.value(depth))

    def _escape(self) -> Reading:
        yield from self.advance()
        if self.current in _ESCAPED:
            yield from self.advance()
            return True
        if not (yield from self.expect("u")):
            return False
        for _ in range(4):
            if self.current not in _HEX_DIGITS:
                return False
            yield from self.advance()
        return True

    def _number(self) -> Reading:
        if self.current == "-":
            yield from self.advance()
        if self.current == "0":
            yield from self.advance()
        elif not (yield from self._digits()):
            return False
        if self.current == ".":
            yield from self.advance()
            if not (yield from self._digits()):
                return False
        if self.current in ("e", "E"):
            yield from self.advance()
            if self.current in ("+", "-"):
                yield from self.advance()
            return (yield from self._digits())
        return True

    def _digits(self) -> Reading:
        if self.current not in _DIGITS:
            return False
        while self.current in _DIGITS:
            yield from self.advance()
        return True


def is_json_object(text: str) -> bool:
    """Whether a whole text is one JSON object, nested no deeper than `MAX_DEPTH`."""
    reading = JsonReader(lambda _: None).whole_object()
    next(reading)
    try:
        for character in (*text, ""):
            reading.send(character)
    except StopIteration as stop:
        return bool(stop.value)
    return False
