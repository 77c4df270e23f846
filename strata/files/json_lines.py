"""Files with a JSON value a line."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path


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
