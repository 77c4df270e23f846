"""What a choice of a completion shows: the prompt, if it is echoed, then the text and log-probabilities of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from strata.engine.messages import TokenLogprobs
from strata.models.tokenizer import Tokenizer
from strata.serve.api.logprobs import LegacyLogprobs
from strata.serve.generation import Piece


@dataclass(frozen=True)
class CompletionPrompt:
    text: str
    ids: list[int]


class Part(NamedTuple):
    """More of a choice. logprobs: lists as of `CompletionLogprobs`, None unless asked for."""

    text: str
    logprobs: dict[str, Any] | None
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceText:
    """One choice. `echo` comes first, if it was asked for."""

    def __init__(self, prompt: CompletionPrompt, tokenizer: Tokenizer) -> None:
        self._prompt = prompt
        self._logprobs = LegacyLogprobs(tokenizer)

    def echo(self, prompt_logprobs: Sequence[TokenLogprobs] | None) -> Part:
        """The prompt. prompt_logprobs: of its tokens from the second on, None unless they are asked for."""
        if prompt_logprobs is None:
            return Part(self._prompt.text, None)
        first = self._logprobs.first_token(self._prompt.ids[0])
        rest = self._logprobs.tokens(prompt_logprobs)
        return Part(self._prompt.text, {name: first[name] + rest[name] for name in first})

    def piece(self, piece: Piece) -> Part:
        logprobs = None if piece.logprobs is None else self._logprobs.tokens(piece.logprobs)
        return Part(piece.text, logprobs, piece.token_ids, piece.finish_reason, piece.stop_reason)


def merged(parts: Sequence[Part]) -> Part:
    """Parts of one choice, in their order, as one."""
    if len(parts) == 1:
        return parts[0]
    lists = [part.logprobs for part in parts if part.logprobs is not None]
    return Part(
        "".join(part.text for part in parts),
        {name: [value for one in lists for value in one[name]] for name in lists[0]} if lists else None,
        [id for part in parts for id in part.token_ids],
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )
