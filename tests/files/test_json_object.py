"""Where a text is no JSON: the line and the column, whoever read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from strata.files.json_object import why_no_json


@pytest.mark.parametrize("decode", [json.loads, msgspec.json.decode])
@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        (b'{"a": 1,\n "b" 2}', 2, 6),
        ('{"größe": 1 x}'.encode(), 1, 13),
        (b'{"a": "one\xfftwo"}', 1, 11),
        (b'{"a":\n\n  nul}', 3, 3),
        (b'["a", ?]', 1, 7),
    ],
)
def test_place(decode: Callable[[bytes], Any], text: bytes, line: int, column: int) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (what is said of it is what is tested)
        decode(text)
    said = why_no_json(text, caught.value)
    # msgspec reads a word to its end before it says that there is none of that name
    assert said.startswith(f"line {line}, column {column}: not ") or (b"nul}" in text and f"line {line}, " in said)
    assert why_no_json(text, caught.value, 7).startswith(f"line {line + 6}, column ")


def test_what_ends_too_early() -> None:
    text = b'{"a": [1,'
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text)
    assert why_no_json(text + b"\n", caught.value) == "line 1, column 10: not JSON: it ends too early"


def test_what_is_json_and_not_what_was_wanted_has_no_column() -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'"x"', type=int)
    assert why_no_json(b'"x"', caught.value, 3) == "line 3: Expected `int`, got `str`"
