"""What a choice of a completion shows: the prompt, if it is echoed, then the text and log-probabilities of a sample.

Choices are written as JSON piece by piece: there is a chunk for every token of every client, and lists may be long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from strata.engine.process.messages import TokenLogprobs
from strata.engine.sampling_params import SamplingParams
from strata.serve.api.logprobs import finite, text_of
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

_encode = msgspec.json.encode


class LogprobLists(NamedTuple):
    """The lists of `schema.completions.CompletionLogprobs`, each as JSON without its brackets, so that several can be
    joined."""

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes

    def written(self) -> bytes:
        """The object of all lists."""
        lists = zip(self._fields, self, strict=True)
        return b"{" + b",".join(b'"%b":[%b]' % (name.encode(), values) for name, values in lists) + b"}"


def joined(parts: Iterable[LogprobLists]) -> LogprobLists:
    """The lists of several parts, one behind the other."""
    columns = zip(*parts, strict=True)
    return LogprobLists(*(b",".join(filter(None, column)) for column in columns))


def logprob_lists(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], starts: Sequence[int]
) -> LogprobLists:
    """The lists of some tokens. entries: None for a prompt's first, which nothing predicts. starts: the text_offset."""
    return LogprobLists(
        _encode([text_of(tokenizer, id) for id in ids])[1:-1],
        _encode([None if entry is None else finite(entry.logprob) for entry in entries])[1:-1],
        _encode([None if entry is None else _likeliest(tokenizer, entry) for entry in entries])[1:-1],
        _encode(starts)[1:-1],
    )


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
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    starts = _TextStarts(detokenizer, spelled=prompt.text, special_ids=tokenizer.special_ids)
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
        self._starts = _TextStarts(detokenizer, start)

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


def written_choice(
    index: int, deltas: Sequence[ChoiceDelta], *, with_ids: bool, prompt_ids: list[int] | None = None
) -> bytes:
    """A `CompletionChoice` as JSON. with_ids: report the token ids. prompt_ids: reported unless None."""
    delta = merged(deltas)
    finish = b"null"
    if delta.finish_reason is not None:
        finish = _encode(delta.finish_reason) + b',"stop_reason":' + _encode(delta.stop_reason)
    return b"".join(
        (
            b'{"index":%d,"text":' % index,
            _encode(delta.text),
            b',"logprobs":',
            b"null" if delta.logprobs is None else delta.logprobs.written(),
            b',"finish_reason":',
            finish,
            b"" if not with_ids else b',"token_ids":' + _encode(delta.token_ids),
            b"" if prompt_ids is None else b',"prompt_token_ids":' + _encode(prompt_ids),
            b"}",
        )
    )


class _TextStarts:
    """Where tokens begin in the text of a choice, in characters; one that begins inside a character stands there.

    start: of the first. spelled: the text of a prompt, in which these special tokens count where it spells them: others
    were put in by the tokenizer, or are left out of the text.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        start: int = 0,
        spelled: str = "",
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._next = start
        self._spelled, self._special_ids = spelled, special_ids

    def take(self, ids: Iterable[int]) -> list[int]:
        """Of the next tokens."""
        starts = []
        for id in ids:
            starts.append(self._next)
            shown = self._detokenizer.append(id)
            if id not in self._special_ids or self._spelled.startswith(shown, self._next):
                self._next += len(shown)
        return starts


def _likeliest(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the one that is there; of two with the same text the likelier stays."""
    found: dict[str, float] = {}
    for id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        found.setdefault(text_of(tokenizer, id), finite(logprob))
    found.setdefault(text_of(tokenizer, entry.token), finite(entry.logprob))
    return found
