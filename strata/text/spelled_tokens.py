"""Special tokens that messages merely spell, kept apart from those that a chat template writes.

A template makes one text of its own special tokens and of what users say, and there a user's `<|end|>` looks like one
of the template's. So a mark is put into every such spelling before the template sees it, and taken out of the text that
comes back. A mark is a number that nobody can guess; messages without such spellings are left as they are.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class ChatText:
    """What a chat template made of messages.

    spelled: (begin, end) of what would be special tokens there, but is text of the messages; in order, none over
        another. Where both are equal, the template has changed such a text: no token may reach over that place.
    """

    text: str
    spelled: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        """Characters."""
        return len(self.text)


class SpelledTokens:
    """Finds the spellings of special tokens; of two that begin at one place, the longer."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted({token for token in tokens if token})
        self._pattern = re.compile(_pattern(texts), re.DOTALL) if texts else None

    def marks(self) -> TokenMarks:
        """Marks for one rendering."""
        return TokenMarks(self._pattern, f"\ue000{secrets.randbelow(10**18):018}\ue001")


class TokenMarks:
    def __init__(self, pattern: re.Pattern[str] | None, mark: str) -> None:
        self._pattern = pattern
        self._mark = mark
        # As it is, and as JSON without letters beyond ASCII has it.
        self._marks = re.compile("|".join(re.escape(one) for one in (mark, mark.encode("unicode-escape").decode())))

    def put(self, value: Any) -> Any:
        """A value of plain JSON with a mark behind the first character of each spelling in it."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(one) for key, one in value.items()}
        return [self.put(one) for one in value] if isinstance(value, list | tuple) else value

    def take(self, text: str) -> ChatText:
        """The text without marks, and where they were."""
        parts = self._marks.split(text)
        whole = "".join(parts)
        if self._pattern is None or len(parts) == 1:
            return ChatText(whole)
        spelled, place, done = [], 0, 0
        for part in parts[:-1]:
            place += len(part)
            found = self._pattern.match(whole, place - 1) if part else None
            begin, end = (place, place) if found is None else found.span()
            spelled.append((max(begin, done), max(end, done)))
            done = spelled[-1][1]
        return ChatText(whole, tuple(spelled))


def _pattern(texts: list[str]) -> str:
    """Any of some sorted texts, the longest, in time that does not depend on how many there are."""
    branches = []
    for _, group in groupby(texts, key=lambda text: text[:1]):
        same = list(group)
        start = os.path.commonprefix(same)  # noqa: RUF071 (these are no paths)
        rest = [text[len(start) :] for text in same if text != start]
        optional = "?" if rest and len(rest) < len(same) else ""
        branches.append(re.escape(start) + (f"(?:{_pattern(rest)}){optional}" if rest else ""))
    return "|".join(branches)
