"""Log-probabilities in the two shapes of OpenAI's API: of chat completions, and the older one of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from strata.engine.messages import TokenLogprobs
from strata.models.tokenizer import Tokenizer

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


class LegacyLogprobs:
    """Gathers the log-probabilities of one choice of a completion: parallel lists with an entry for each token.

    offset: where in the text of the choice the next token begins, in characters.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def first_token(self, id: int) -> dict[str, Any]:
        """Of a prompt's first token, which nothing predicts."""
        return self._lists([id], [None], [None])

    def tokens(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._lists(
            [entry.token for entry in entries],
            [_finite(entry.logprob) for entry in entries],
            [self._likeliest(entry) for entry in entries],
        )

    def _lists(
        self, ids: list[int], logprobs: list[float | None], top: list[dict[str, float] | None]
    ) -> dict[str, Any]:
        texts = [_text(self._tokenizer, id) for id in ids]
        offsets = []
        for id, text in zip(ids, texts, strict=True):
            offsets.append(self._offset)
            if id not in self._tokenizer.special_ids:  # those are not in the text
                self._offset += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _likeliest(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that is there; of two with the same text the likelier stays."""
        found: dict[str, float] = {}
        for id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            found.setdefault(_text(self._tokenizer, id), _finite(logprob))
        found.setdefault(_text(self._tokenizer, entry.token), _finite(entry.logprob))
        return found


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    raw = _bytes(tokenizer, id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(tokenizer: Tokenizer, id: int) -> str:
    return _bytes(tokenizer, id).decode("utf-8", "replace")


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """What a token adds to the text: part of a character, in some tokenizers."""
    if tokenizer.joins_bytes:
        return tokenizer.token_bytes(id)
    return tokenizer.decode([id], skip_special_tokens=False).encode()


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
