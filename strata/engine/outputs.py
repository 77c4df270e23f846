"""What a request gives back, with the names of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """The log-probability (natural, of the model's own distribution) of a token at one position.

    rank: 1 for the likeliest token of the vocabulary.
    decoded_token: its text, None when the request is not detokenized.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock; None for what has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    index: its number among the request's `n` samples.
    cumulative_logprob: sum of the log-probabilities of `token_ids`; None unless logprobs were asked for.
    logprobs: for each token of `token_ids`, token id to `Logprob` of it and of the likeliest tokens; None unless asked.
    finish_reason: "stop" (end of sequence, stop string or stop id), "length", "abort", or "error" (see
        `RequestOutput.error`); None while it runs.
    stop_reason: the stop string or stop id that ended it; None for an end-of-sequence id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its samples so far.

    prompt: the text it was asked with, None when it came as token ids.
    prompt_logprobs: for each prompt token, token id to `Logprob`; the first entry is None, since nothing predicts the
        first token. None as a whole unless asked for.
    num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
    error: why the request failed, in one line; None if it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """embedding: a vector of the model's hidden size and of length 1 (L2)."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its vector. prompt: the text it was asked with, None when it came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
