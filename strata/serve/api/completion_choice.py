"""What a choice of a completion shows: the prompt, if it is echoed, then the text and log-probabilities of a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata.engine.process.messages import TokenLogprobs
from strata.engine.sampling_params import SamplingParams
from strata.serve.api.completion_logprobs import LogprobLists, PromptStarts, SampleStarts, joined, logprob_lists
from strata.serve.generation import Piece
from strata.serve.http.errors import ApiError
from strata.text.detokenize import IncrementalDetokenizer
from strata.text.tokenizer import Tokenizer

# Tokens whose log-probabilities are written before other tasks get a turn: a few milliseconds' work.
_TOKENS_A_TURN = 256

# What prompts may come to in an answer that repeats them, each as often as it has choices.
MOST_ECHOED_BYTES = 32 * 2**20
# A log-probability with its token's text, about.
_ENTRY_BYTES = 32


@dataclass(frozen=True)
class CompletionPrompt:
    text: str
    ids: list[int]


class Part(NamedTuple):
    """More of a choice. logprobs: None unless asked for."""

    text: str
    logprobs: LogprobLists | None = None
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def check_echo(prompts: Sequence[CompletionPrompt], samples: int, logprobs: int | None) -> None:
    """Raises ApiError (400) if the prompts, repeated in each choice, would make too large an answer.

    logprobs: how many of the likeliest tokens are told at each place, None for no log-probabilities.
    """
    entries = 0 if logprobs is None else logprobs + 1
    size = samples * sum(len(prompt.text) + _ENTRY_BYTES * entries * len(prompt.ids) for prompt in prompts)
    if size > MOST_ECHOED_BYTES:
        raise ApiError(
            400,
            f"echo: the prompts and their log-probabilities would be about {size >> 20} MB of the answer, which has at "
            f"most {MOST_ECHOED_BYTES >> 20} MB for them: ask with a lower n or logprobs, or for fewer prompts at once",
            param="echo",
            code="answer_too_large",
        )


async def echo_of(
    prompt: CompletionPrompt, prompt_logprobs: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer
) -> Part:
    """The prompt, which each of its choices begins with.

    prompt_logprobs: of its tokens from the second on, None unless they are asked for.
    """
    if prompt_logprobs is None:
        return Part(prompt.text)
    entries = [None, *prompt_logprobs]
    starts = PromptStarts(prompt.text, tokenizer)
    written = []
    for first in range(0, len(prompt.ids), _TOKENS_A_TURN):
        some = slice(first, first + _TOKENS_A_TURN)
        ids = prompt.ids[some]
        written.append(logprob_lists(tokenizer, ids, entries[some], starts.take(ids)))
        await asyncio.sleep(0)
    return Part(prompt.text, joined(written))


class ChoiceText:
    """A sample's part of one choice. start: characters of the choice before it."""

    def __init__(self, prompt: CompletionPrompt, params: SamplingParams, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        detokenizer = IncrementalDetokenizer(tokenizer, prompt.ids, skip_special_tokens=params.skip_special_tokens)
        self._starts = SampleStarts(detokenizer, start)

    def part(self, piece: Piece) -> Part:
        logprobs = None
        if piece.logprobs is not None:
            ids = [entry.token for entry in piece.logprobs]
            logprobs = logprob_lists(self._tokenizer, ids, piece.logprobs, self._starts.take(ids))
        return Part(piece.text, logprobs, piece.token_ids, piece.finish_reason, piece.stop_reason)


def merged(parts: Sequence[Part]) -> Part:
    """Parts of one choice, in their order, as one."""
    if len(parts) == 1:
        return parts[0]
    lists = [part.logprobs for part in parts if part.logprobs is not None]
    return Part(
        "".join(part.text for part in parts),
        joined(lists) if lists else None,
        [id for part in parts for id in part.token_ids],
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )
