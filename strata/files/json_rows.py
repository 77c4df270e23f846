"""Files of JSON values, read one by one: a value a line, or the rows of one array."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

_BLANKS = re.compile(r"[ \t\n\r]*")


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number, from 1. Raises OSError.

    A byte order mark is no part of a line; where marked files were joined, there are some within.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if (text := without_mark(line)).strip():
                yield number, text


def without_mark(text: bytes) -> bytes:
    """A text without the byte order mark that some editors write before it."""
    return text.removeprefix(BOM_UTF8)


def array_rows(raw: bytes) -> Iterator[tuple[int, int, Any]]:
    """The rows of an array, each with the bytes where it begins and where it ends.

    Raises JSONDecodeError, UnicodeDecodeError or RecursionError at what is no such array (`why_no_json` says where).
    """
    text = raw.decode()
    decode = json.JSONDecoder().raw_decode
    at = _after_blanks(text, 0)
    if not text.startswith("[", at):
        raise JSONDecodeError("Expecting '['", text, at)
    at = _after_blanks(text, at + 1)
    more = not text.startswith("]", at)
    counted = end = 0  # so many characters, which are so many bytes
    while more:
        value, behind = decode(text, at)
        start = end + len(text[counted:at].encode())
        end = start + len(text[at:behind].encode())
        counted = behind
        yield start, end, value
        at = _after_blanks(text, behind)
        if more := text.startswith(",", at):
            at = _after_blanks(text, at + 1)
    if not text.startswith("]", at):
        raise JSONDecodeError("Expecting ',' or ']'", text, at)
    if (at := _after_blanks(text, at + 1)) < len(text):
        raise JSONDecodeError("Extra data", text, at)


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at
