"""Files that are one JSON array, read row by row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

_BLANKS = re.compile(r"[ \t\n\r]*")


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
