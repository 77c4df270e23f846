"""How many there are of something, in words."""

from __future__ import annotations

import pytest

from strata.text.counted import counted


@pytest.mark.parametrize(
    ("number", "nouns", "words"),
    [
        (1, ("token",), "1 token"),
        (0, ("token",), "0 tokens"),
        (1234, ("token",), "1,234 tokens"),
        (1.2, ("token",), "1 token"),  # as it is shown
        (1.7, ("token",), "2 tokens"),
        (1, ("prefix", "prefixes"), "1 prefix"),
        (2, ("prefix", "prefixes"), "2 prefixes"),
    ],
)
def test_the_noun_has_the_number_that_is_shown(number: float, nouns: tuple[str, ...], words: str) -> None:
    assert counted(number, *nouns) == words
