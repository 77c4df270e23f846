"""Log-probabilities in the older shape of OpenAI's API, that of completions, written as JSON piece by piece.

What the lists hold is in `schema.completions.CompletionLogprobs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from strata.engine.process.messages import TokenLogprobs
from strata.serve.api.logprobs import finite, text_of
from strata.text.detokenize import IncrementalDetokenizer
from strata.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class LogprobLists(NamedTuple):
    """Each list as JSON without its brackets, so that several can be joined."""

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes

    def written(self) -> bytes:
        """The object of all lists."""
        lists = zip(self._fields, self, strict=True)
        return b"{" + b",".join(b'"%b":[%b]' % (name.encode(), values) for name, values in lists) + b"}"


def joined(parts: Iterable[LogprobLists]) -> LogprobLists:
    """The lists of several parts, one behind the other."""
    columns = zip(*parts, strict=True)
    return LogprobLists(*(b",".join(filter(None, column)) for column in columns))


def logprob_lists(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], starts: Sequence[int]
) -> LogprobLists:
    """The lists of some tokens. entries: None for a prompt's first, which nothing predicts. starts: the text_offset."""
    return LogprobLists(
        _encode([text_of(tokenizer, id) for id in ids])[1:-1],
        _encode([None if entry is None else finite(entry.logprob) for entry in entries])[1:-1],
        _encode([None if entry is None else _likeliest(tokenizer, entry) for entry in entries])[1:-1],
        _encode(starts)[1:-1],
    )


class PromptStarts:
    """Where the tokens of a prompt begin in its text, in characters; one that begins inside a character stands there.

    Special tokens count where the text spells them: others were put in by the tokenizer, or are left out of the text.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._special_ids = tokenizer.special_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
        self._next = 0

    def take(self, ids: Iterable[int]) -> list[int]:
        """Of the next tokens."""
        starts = []
        for id in ids:
            starts.append(self._next)
            shown = self._detokenizer.append(id)
            if id not in self._special_ids or self._text.startswith(shown, self._next):
                self._next += len(shown)
        return starts


class SampleStarts:
    """The same of a sample, whose text is what its tokens add. start: how much text is before it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, start: int) -> None:
        self._detokenizer = detokenizer
        self._next = start

    def take(self, ids: Iterable[int]) -> list[int]:
        starts = []
        for id in ids:
            starts.append(self._next)
            self._next += len(self._detokenizer.append(id))
        return starts


def _likeliest(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the one that is there; of two with the same text the likelier stays."""
    found: dict[str, float] = {}
    for id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        found.setdefault(text_of(tokenizer, id), finite(logprob))
    found.setdefault(text_of(tokenizer, entry.token), finite(entry.logprob))
    return found
