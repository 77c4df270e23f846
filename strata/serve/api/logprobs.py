"""Log-probabilities as chat completions and responses tell them (completions: `completion_logprobs`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strata.engine.process.messages import TokenLogprobs
from strata.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """One object for each token; see `schema.chat_reply.TokenLogprob`."""
    return [
        _token(tokenizer, entry.token, entry.logprob)
        | {
            "top_logprobs": [
                _token(tokenizer, id, logprob) for id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ]
        }
        for entry in entries
    ]


def text_of(tokenizer: Tokenizer, id: int) -> str:
    """A token's text by itself; U+FFFD for a part of a character."""
    return _bytes(tokenizer, id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    raw = _bytes(tokenizer, id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """What a token adds to the text: part of a character, in some tokenizers."""
    if tokenizer.joins_bytes:
        return tokenizer.token_bytes(id)
    return tokenizer.decode([id], skip_special_tokens=False).encode()
