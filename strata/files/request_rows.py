"""Files of requests, a JSON object a line: loads to send or to simulate, and traces to plan for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from strata.files.json_object import why_no_json
from strata.files.json_rows import json_lines

# Tokens of a block that the traces of Mooncake name (Qin et al. 2024, arXiv:2407.00079).
HASHED_TOKENS = 512
_LENGTH = "a whole number of tokens, at least 1"
# What each field takes.
_FORMS = {
    "prompt": "a text or a list of token ids, not empty",
    "messages": "the list of a chat's messages, not empty",
    "input_length": _LENGTH,
    "output_length": _LENGTH,
    "timestamp": "milliseconds, at least 0",
    "hash_ids": f"a list of whole numbers, a name for each {HASHED_TOKENS} tokens of input_length",
}
_PROMPTS = ("prompt", "messages", "input_length")
_ACCEPTED = "one of prompt, messages and input_length, and where wanted output_length, timestamp and hash_ids"
_SHOWN = 60

Messages = list[dict[str, Any]]


class RequestRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file.

    One of: prompt (text or token ids), messages (of a chat), input_length (tokens of a random prompt).
    output_length: tokens of the answer. timestamp: milliseconds, as in the traces of Mooncake. hash_ids: as there, a
    name for each 512 tokens of a prompt of input_length; the same name stands for the same tokens.
    """

    prompt: str | list[int] | None = None
    messages: Messages | None = None
    input_length: int | None = None
    output_length: int | None = None
    timestamp: float | None = None
    hash_ids: list[int] | None = None


def read_rows(path: Path, *, ordered: bool, needed: tuple[str, ...] = ()) -> tuple[RequestRow, ...]:
    """The requests of a JSON-lines file. ordered: no timestamp may be before that of the line above. needed: fields
    that every line must have.

    Raises ValueError that names the line at fault and what it may be, and OSError for a file that cannot be read.
    """
    rows: list[RequestRow] = []
    for number, line in json_lines(path):
        where = f"{path}, line {number}"
        try:
            row = msgspec.json.decode(line, type=RequestRow)
        except (ValueError, RecursionError):
            raise ValueError(f"{path}, {_why_no_row(line, number)}") from None
        _check(row, where, needed)
        if ordered and rows:
            _check_order(row, rows[-1], where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no requests: give a JSON object a line, with {_ACCEPTED}")
    return tuple(rows)


def _why_no_row(line: bytes, number: int) -> str:
    """Of a line that is no `RequestRow`, and maybe no JSON."""
    try:
        values = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        return why_no_json(line, error, number)
    if not isinstance(values, dict):
        return f"line {number}: a request is a JSON object with {_ACCEPTED}; got {_shown(values)}"
    unknown = [name for name in values if name not in _FORMS]
    if unknown:
        return f"line {number}: there is no field {_shown(unknown[0])}; accepted are {_ACCEPTED}"
    wrong = next(_wrong(name, value) for name, value in values.items() if not _is_taken(name, value))
    return f"line {number}: {wrong}"


def _is_taken(name: str, value: object) -> bool:
    try:
        msgspec.convert({name: value}, RequestRow)
    except msgspec.ValidationError:
        return False
    return True


def _check(row: RequestRow, where: str, needed: tuple[str, ...]) -> None:
    for name in ("input_length", "output_length"):
        value = getattr(row, name)
        if value is not None and value < 1:
            raise ValueError(f"{where}: {_wrong(name, value)}")
    given = [name for name in _PROMPTS if getattr(row, name) is not None]
    if len(given) != 1:
        has = " and ".join(given) or "none"
        raise ValueError(f"{where}: a request has one of prompt, messages and input_length, this one has {has}")
    for name in given:
        if not getattr(row, name):
            raise ValueError(f"{where}: {_wrong(name, getattr(row, name))}")
    if row.timestamp is not None and row.timestamp < 0:
        raise ValueError(f"{where}: {_wrong('timestamp', row.timestamp)}")
    if row.hash_ids is not None and len(row.hash_ids) != -(-(row.input_length or 0) // HASHED_TOKENS):
        raise ValueError(
            f"{where}: hash_ids names {len(row.hash_ids)} blocks of {HASHED_TOKENS} tokens, which input_length "
            f"{row.input_length} is not of"
        )
    for name in needed:
        if getattr(row, name) is None:
            raise ValueError(f"{where} has no {name}, which is needed here: give {_FORMS[name]}")


def _check_order(row: RequestRow, before: RequestRow, where: str) -> None:
    if row.timestamp is not None and before.timestamp is not None and row.timestamp < before.timestamp:
        raise ValueError(
            f"{where}: timestamp {row.timestamp:.15g} is before that of the line above, {before.timestamp:.15g}: sort "
            "the trace by its timestamps"
        )


def _wrong(name: str, value: object) -> str:
    return f"{name} must be {_FORMS[name]}, got {_shown(value)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
