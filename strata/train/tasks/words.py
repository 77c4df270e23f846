"""What exercises are said with, from `texts.toml` beside this file, and pseudo-words that are made of syllables."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


def texts(section: str) -> dict[str, Any]:
    """Of a section of the file, by name: lists of phrasings, and of words."""
    found = _read()
    for name in section.split("."):
        found = found[name]
    return {name: value.split() if isinstance(value, str) else value for name, value in found.items()}


_TEXTS, _COMMON = texts("words"), texts("words.common")
NAMES: list[str] = _TEXTS["names"]
ANIMALS, FOODS, THINGS, PLACES_WORDS = (_COMMON[kind] for kind in ("animals", "foods", "things", "places_words"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 3, 10
SPELLABLE: tuple[str, ...] = tuple(
    word for word in sorted(set().union(*_COMMON.values())) if SHORTEST <= len(word) <= LONGEST
)


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable word of no language, 3 to 10 letters."""
    while True:
        word = ""
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
            word += rng.choice(_TEXTS["onsets"]) if rng.random() < 0.85 else ""
            word += rng.choice(_TEXTS["vowels"])
            word += rng.choice(_TEXTS["codas"]) if rng.random() < 0.4 else ""
        if SHORTEST <= len(word) <= LONGEST:
            return word


def letter_string(rng: random.Random) -> str:
    """Three to eight random letters."""
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(3, 9)))


def any_word(rng: random.Random) -> str:
    """A word to spell: mostly real or pronounceable, sometimes letters at random."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(SPELLABLE)
    return pseudo_word(rng) if draw < 0.90 else letter_string(rng)
