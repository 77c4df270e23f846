"""Rows of Alpaca, {"instruction", "input", "output"}, as chats: the mapping of LLaMA-Factory and ms-swift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.train.data.turns import Turn, unmarked

ROW = ("instruction", "output")


def alpaca_prompt(record: Mapping[str, Any]) -> list[Turn]:
    """The turns before the output: those of `history`, then the user's, instruction and input in a line each.

    Raises ValueError that names the field.
    """
    turns = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"'history' must be a list of prompts with their responses, got {history!r:.60}")
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"history[{at}] must be a prompt and its response, two texts, got {pair!r:.60}")
        turns += [unmarked("user", pair[0]), unmarked("assistant", pair[1])]
    asked = [text_of(record, field) for field in ("instruction", "input") if record.get(field) not in (None, "")]
    if not asked:
        raise ValueError("'instruction' and 'input' are empty, so nothing is asked")
    return [*turns, unmarked("user", "\n".join(asked))]


def alpaca_turns(record: Mapping[str, Any]) -> list[Turn]:
    """The whole chat; responses of `history` are learned like the output. Raises ValueError that names the field."""
    return [*alpaca_prompt(record), unmarked("assistant", text_of(record, "output"))]


def text_of(record: Mapping[str, Any], field: str) -> str:
    """A field that must be a text."""
    if not isinstance(record[field], str):
        raise ValueError(f"{field!r} must be a text, got {record[field]!r:.60}")
    text: str = record[field]
    return text
