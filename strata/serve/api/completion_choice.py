"""What a choice of a completion shows: the prompt, if it is echoed, then the text and log-probabilities of a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from strata.engine.process.messages import TokenLogprobs
from strata.engine.sampling_params import SamplingParams
from strata.serve.api.completion_logprobs import LogprobLists, PromptStarts, SampleStarts, joined, logprob_lists
from strata.serve.api.prompts import Prompt
from strata.serve.generation import SampleDelta
from strata.serve.http.errors import ApiError
from strata.text.detokenize import IncrementalDetokenizer
from strata.text.tokenizer import Tokenizer

# Tokens whose log-probabilities are written before other tasks get a turn: a few milliseconds' work.
_TOKENS_PER_SLICE = 256

# What prompts may come to in an answer that repeats them, each as often as it has choices.
MAX_ECHOED_BYTES = 32 * 2**20
# A log-probability with its token's text, about.
_ENTRY_BYTES = 32


class ChoiceDelta(NamedTuple):
    """More of a choice. logprobs: None unless asked for."""

    text: str
    logprobs: LogprobLists | None = None
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def check_echo(prompts: Sequence[Prompt], samples: int, logprobs: int | None) -> None:
    """Raises ApiError (400) if the prompts, repeated in each choice, would make too large an answer.

    logprobs: how many of the likeliest tokens are reported at each position, None for no log-probabilities.
    """
    entries = 0 if logprobs is None else logprobs + 1
    size = samples * sum(len(prompt.text) + _ENTRY_BYTES * entries * len(prompt.ids) for prompt in prompts)
    if size > MAX_ECHOED_BYTES:
        raise ApiError(
            400,
            f"echo: the prompts and their log-probabilities would be about {size >> 20} MB of the answer, which has at "
            f"most {MAX_ECHOED_BYTES >> 20} MB for them: ask with a lower n or logprobs, or for fewer prompts at once",
            param="echo",
            code="answer_too_large",
        )


async def echo_of(prompt: Prompt, prompt_logprobs: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer) -> ChoiceDelta:
    """The prompt, which each of its choices begins with.

    prompt_logprobs: of its tokens from the second on, None unless they are asked for.
    """
    if prompt_logprobs is None:
        return ChoiceDelta(prompt.text)
    entries = [None, *prompt_logprobs]
    starts = PromptStarts(prompt.text, tokenizer)
    written = []
    for first in range(0, len(prompt.ids), _TOKENS_PER_SLICE):
        some = slice(first, first + _TOKENS_PER_SLICE)
        ids = prompt.ids[some]
        written.append(logprob_lists(tokenizer, ids, entries[some], starts.take(ids)))
        await asyncio.sleep(0)
    return ChoiceDelta(prompt.text, joined(written))


class ChoiceText:
    """A sample's part of one choice. start: characters of the choice before it."""

    def __init__(self, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        detokenizer = IncrementalDetokenizer(tokenizer, prompt.ids, skip_special_tokens=params.skip_special_tokens)
        self._starts = SampleStarts(detokenizer, start)

    def append(self, delta: SampleDelta) -> ChoiceDelta:
        logprobs = None
        if delta.logprobs is not None:
            ids = [entry.token for entry in delta.logprobs]
            logprobs = logprob_lists(self._tokenizer, ids, delta.logprobs, self._starts.take(ids))
        return ChoiceDelta(delta.text, logprobs, delta.token_ids, delta.finish_reason, delta.stop_reason)


def merged(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """Parts of one choice, in their order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    lists = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return ChoiceDelta(
        "".join(delta.text for delta in deltas),
        joined(lists) if lists else None,
        [id for delta in deltas for id in delta.token_ids],
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )
