"""Words that an output must not hold, as the ids whose sequences are never completed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

from strata.text.tokenizer import Tokenizer

# What may stand before a word: tokenizers write one in another way where a text begins, or a line, or after other text.
# A word may grow together with one of these ("\n\n", "an"), and then shows nothing there.
_BEFORE = ("", "\n", "a")

# Encoded characters for one of a word.
TIMES_ENCODED = 2 * len(_BEFORE)


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The id sequences of each word, as it begins a text or follows one, and of a space and the word.

    Each spells the word, with or without a space before it, and nothing else: none for a word that the tokenizer cannot
    write. What ends with another of them is left out, which is never completed either.
    """
    before = {text: tuple(tokenizer.encode(text, add_special_tokens=False)) for text in _BEFORE}
    found = dict.fromkeys(ids for word in words for ids in _spellings(word, before, tokenizer))
    return [ids for ids in found if not any(ids[start:] in found for start in range(1, len(ids)))]


def _spellings(word: str, before: dict[str, tuple[int, ...]], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    for text in (word, f" {word}"):
        for context, ids_before in before.items():
            ids = tuple(tokenizer.encode(context + text, add_special_tokens=False))
            start = len(ids_before)
            if ids[:start] == ids_before and len(ids) > start and _spells(text, ids, ids_before, tokenizer):
                yield ids[start:]


def _spells(text: str, ids: tuple[int, ...], ids_before: tuple[int, ...], tokenizer: Tokenizer) -> bool:
    """Whether a text is what the ids add to those before; many tokenizers compose its characters (NFC)."""
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    expected = tokenizer.decode(ids_before, skip_special_tokens=False) + text
    return unicodedata.normalize("NFC", whole) == unicodedata.normalize("NFC", expected)
