"""What the loop asks of a matcher that it is given; it loads neither torch nor llguidance."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_ERROR_CHARACTERS = 500


def takes_end(matcher: LLMatcher, token: int) -> bool:
    """Take the next id of an output. Whether it was an end-of-sequence id, so that the output is complete."""
    if matcher.is_stopped():  # only such ids were allowed
        return True
    matcher.consume_token(token)
    return bool(matcher.stop_reason() == "EndOfSentence")


def explain(error: str) -> str:
    """What llguidance says is wrong, in one line and without the state of its parser."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    if unsupported := re.match(r'Unimplemented keys: \["(.*)"\]', error):  # a list in Rust's notation
        return "these keywords of JSON Schema cannot be enforced: " + unsupported[1].replace('", "', ", ")
    line = error.partition("\n")[0]
    if reason := re.search(r"^error: (.*)$", error, re.MULTILINE):  # of a regular expression, after a drawing of where
        line = f"{line} {reason[1]}"
    return line[:_MAX_ERROR_CHARACTERS]
