"""Reading JSON that a user gave, with errors that name the file, the line and the column."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from strata.files.json_rows import without_mark

# What msgspec says of a text: the reason, and the byte where it stands.
_AT_BYTE = re.compile(r"(?:JSON is malformed: )?(.*) \(byte (\d+)\)", re.DOTALL)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file. Raises ValueError if it is not one."""
    try:
        return read_existing_object(path)
    except FileNotFoundError:
        return {}


def read_existing_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises FileNotFoundError, and ValueError for anything else that it is not."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        values = json.loads(text.decode("utf-8-sig"))  # of bytes, json guesses the encoding
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, {why_no_json(text, error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(values).__name__}")
    return values


def why_no_json(text: bytes, error: Exception, line: int = 1) -> str:
    """Where and why a text is no JSON: "line 3, column 5: not JSON: expected ','".

    error: what json.loads or msgspec.json.decode raised. line: the number of the text's first line.
    """
    if isinstance(error, json.JSONDecodeError):
        return f"line {line + error.lineno - 1}, column {error.colno}: not JSON: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return why_no_text(text, line)
    if isinstance(error, RecursionError):
        return f"line {line}: not JSON: nested too deeply"
    if found := _AT_BYTE.fullmatch(str(error)):
        return f"{_place(text, int(found[2]), line)}: not JSON: {found[1]}"
    if str(error) == "Input data was truncated":
        return f"{_place(text, len(text.rstrip()), line)}: not JSON: it ends too early"
    return f"line {line}: {error}"


def why_no_text(text: bytes, line: int = 1) -> str:
    """Where the first byte stands that is not UTF-8; `line` as in `why_no_json`. There must be one."""
    text = without_mark(text)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"{_place(text, error.start, line)}: not UTF-8: byte 0x{text[error.start]:02x}"
    raise AssertionError("the text is UTF-8")


def _place(text: bytes, at: int, line: int) -> str:
    """The line and the column (characters, from 1) of a byte."""
    *above, beside = text[:at].split(b"\n")
    return f"line {line + len(above)}, column {len(beside.decode('utf-8', 'replace')) + 1}"
