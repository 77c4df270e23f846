"""Words that an output must not hold, as the ids whose sequences are never completed."""

from __future__ import annotations

from collections.abc import Iterable

from strata.text.tokenizer import Tokenizer


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The id sequences of each word: as it begins a text, and as it follows a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and ids not in found:
                found.append(ids)
    return found
