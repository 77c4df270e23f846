"""Text that models are compared on, as token ids in passages that fit into a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from strata.files.json_object import why_no_json
from strata.files.json_rows import json_lines
from strata.text.tokenizer import Tokenizer
from strata.train.data.records import tools_of
from strata.train.tasks.example import BOUNDARY, Example
from strata.train.tasks.mixture import TASKS, held_out_examples


@dataclass(frozen=True)
class Passage:
    """ids: a prompt. first: of its ids, the first that is scored, 1 or more. document: where it comes from."""

    ids: tuple[int, ...]
    first: int
    document: int

    @property
    def scored(self) -> int:
        """How many of its ids are."""
        return len(self.ids) - self.first


def read_passages(file: Path, tokenizer: Tokenizer, length: int) -> list[Passage]:
    """The documents of a file in passages of at most `length` ids, in order.

    A name that ends in .jsonl is of JSON lines, each {"text": ...} or {"messages": [...]}, a chat by the tokenizer's
    template, with its tools and chat_template_kwargs; any other file is one document of plain text. Where the tokenizer
    begins a text with a special id, each passage begins with it. Raises ValueError for a file that is missing, empty,
    or no such text, by its line.
    """
    try:
        if file.suffix == ".jsonl":
            documents = [_ids_of(line, file, number, tokenizer) for number, line in json_lines(file)]
        else:
            text = file.read_text(encoding="utf-8-sig")
            documents = [tokenizer.encode(text)] if text.strip() else []
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a file of JSON lines (.jsonl) or of plain text") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: byte {error.start} is not; convert it first") from None
    found = [one for number, ids in enumerate(documents) for one in _cut(ids, length, number, tokenizer.bos_id)]
    if not found:
        raise ValueError(
            f"{file} has no document of two tokens or more, so there is nothing to predict; give more text"
        )
    return found


def _ids_of(line: bytes, file: Path, number: int, tokenizer: Tokenizer) -> list[int]:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, {why_no_json(line, error, number)}") from None
    given = record if isinstance(record, dict) else {}
    try:
        if isinstance(given.get("messages"), list):
            variables = given.get("chat_template_kwargs")
            return tokenizer.encode_chat(
                given["messages"], add_generation_prompt=False, tools=tools_of(given), variables=variables
            )
        if isinstance(given.get("text"), str):
            return tokenizer.encode(given["text"])
    except ValueError as error:
        raise ValueError(f"{file}, line {number}: {error}") from None
    shown = line.decode()[:60].rstrip()
    raise ValueError(f'{file}, line {number}: must be {{"text": "..."}} or {{"messages": [...]}}, got {shown}')


def _cut(ids: Sequence[int], length: int, document: int, begin: int | None) -> list[Passage]:
    """Passages of a document; a rest of one id is left out, for nothing predicts it."""
    opening = (begin,) if ids and ids[0] == begin else ()
    body = tuple(ids[len(opening) :])
    step = length - len(opening)
    parts = [(*opening, *body[start : start + step]) for start in range(0, len(body), step)]
    return [Passage(part, 1, document) for part in parts if len(part) > 1]


def exercise_passages(tokenizer: Tokenizer, count: int, length: int) -> list[Passage]:
    """Held-out exercises of the built-in model with their right replies, as a chat, or without a template as text; the
    replies alone are scored. Each is a document.

    Raises ValueError if no exercise leaves room for a reply in `length` ids.
    """
    of_each = [held_out_examples(task, -(-count // len(TASKS))) for task in TASKS]
    in_turn = [one for some in zip_longest(*of_each) for one in some if one is not None][:count]
    pairs = ((_ids_until_reply(tokenizer, one), _ids_of_exercise(tokenizer, one)) for one in in_turn)
    cut = [(_alike(prompt, ids), ids[:length]) for prompt, ids in pairs]
    found = [Passage(tuple(ids), first, number) for number, (first, ids) in enumerate(cut) if 0 < first < len(ids)]
    if not found:
        raise ValueError(f"passages of {length} tokens leave no room for a reply; give more")
    return found


def _ids_until_reply(tokenizer: Tokenizer, example: Example) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{example.question}\n")
    return tokenizer.encode_chat([{"role": "user", "content": example.question}])


def _ids_of_exercise(tokenizer: Tokenizer, example: Example) -> list[int]:
    reply = example.reply.replace(BOUNDARY, "")
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{example.question}\n{reply}")
    turns = [{"role": "user", "content": example.question}, {"role": "assistant", "content": reply}]
    return tokenizer.encode_chat(turns, add_generation_prompt=False)


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))
