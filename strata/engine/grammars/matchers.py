"""What the loop asks of a matcher that it is given; it loads neither torch nor llguidance."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_ERROR_CHARACTERS = 500

# What its errors begin with, or hold, and what they mean.
_SENTENCES = (
    (r"^NoExtension", "nothing satisfies it"),
    (
        r"^oneOf constraints are not supported",
        "oneOf cannot be enforced if a value may follow two of its schemas: use anyOf",
    ),
    (
        r"^Failed to generate regex for .* range",
        "a bound of a number is too large: leave it out, or take a smaller one",
    ),
    (r"Regex is empty", "nothing satisfies it: a pattern, format or length of a string contradicts another"),
    (
        r"^Resource '(.*)' is not present",
        r"it refers to \1, and no other document is read: put that into its own $defs",
    ),
    (
        r"(?i)too many items|row has \d+ items|too many (expressions|states)|too big \(limit|stack level exceeded",
        "it takes too much, as there are too many ways to read an output: make it simpler",
    ),
)


def takes_end(matcher: LLMatcher, token: int) -> bool:
    """Take the next id of an output. Whether it was an end-of-sequence id, so that the output is complete."""
    if matcher.is_stopped():  # only such ids were allowed
        return True
    matcher.consume_token(token)
    return bool(matcher.stop_reason() == "EndOfSentence")


def explain(error: str) -> str:
    """What llguidance says is wrong, in one line and in the words of who asks: without its options and its parser."""
    line = error.partition("\n")[0]
    for pattern, sentence in _SENTENCES:
        if found := re.search(pattern, line):
            return found.expand(sentence)[:_MAX_ERROR_CHARACTERS]
    if unsupported := re.match(r'Unimplemented keys: \["(.*)"\]', line):  # a list in Rust's notation
        return "these keywords of JSON Schema cannot be enforced: " + unsupported[1].replace('", "', ", ")
    if reason := re.search(r"^error: (.*)$", error, re.MULTILINE):  # of a regular expression, after a drawing of where
        line = f"{line} {reason[1]}"
    return line[:_MAX_ERROR_CHARACTERS]
