"""The process that tries grammars before an engine sees them: one that takes too long or too much memory ends alone.

It is run by `strata.serve.grammar`: {"grammar"} gives {"wrong"}, null if nothing is. No model's vocabulary is loaded:
here a token is a byte, which makes the same automaton.
"""

from __future__ import annotations

import random
import resource
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from strata.engine.grammars.limits import LIMITS
from strata.engine.grammars.matchers import explain
from strata.text.killable_worker import serve_answers

MEMORY_BYTES = 768 * 2**20
# llguidance follows rules that name each other by recursion, and where the stack ends, so does the process. That of an
# engine's thread is larger: 2 MiB at least, where nothing limits stacks.
STACK_BYTES = 2**20

# Some faults show only once an output has begun, such as more alternatives in one place than the parser follows.
_WALKS = 4
_WALK_BYTES = 200
_END = 256


class _Bytes:
    """The vocabulary of all bytes and an end, as llguidance wants to be told of it."""

    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def answer(request: dict[str, Any]) -> dict[str, str | None]:
    return {"wrong": what_is_wrong(request["grammar"])}


def what_is_wrong(grammar: str) -> str | None:
    """Why outputs cannot be kept to a grammar, None if they can."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    wrong = None
    for seed in range(_WALKS):
        wrong = wrong or _walk(matcher.deep_copy(), random.Random(seed))
    return wrong


def _walk(matcher: LLMatcher, chance: random.Random) -> str | None:
    """Write an output of any bytes that are allowed, for a while, and end it only where it must; returns what goes
    wrong."""
    for _ in range(_WALK_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return explain(matcher.get_error())
        allowed = [token for token in range(_END) if mask >> token & 1]
        if not allowed:
            return None if matcher.is_accepting() else "nothing satisfies it"
        matcher.consume_token(chance.choice(allowed))
    return None


if __name__ == "__main__":
    with suppress(ValueError, OSError):  # only Linux lowers the limit of a thread that runs
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    serve_answers(answer, MEMORY_BYTES)
