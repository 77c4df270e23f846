"""The body of a completion request, and what completions answer with, whole or as chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from strata.engine.sampling_params import RANGES
from strata.serve.http.errors import ApiError
from strata.serve.schema.base import ReplyModel, Unsupported, described_as
from strata.serve.schema.reply import AnswerModel, Usage
from strata.serve.schema.sampling import Ids, SamplingFields, TopLogprobs
from strata.serve.schema.structured import FormatFields

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16

Prompt = Annotated[
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)],
    described_as(f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
]


class CompletionRequest(FormatFields, SamplingFields):
    prompt: Prompt | None = None
    """What to write on from: a string, token ids, or several of either, each of which is answered."""
    prompt_token_ids: Ids | None = None
    """The ids of one prompt, in place of `prompt`. (vLLM's extension.)"""
    max_tokens: Annotated[int, Field(ge=0, le=RANGES["max_tokens"].most)] | None = None
    """The most tokens to generate in each sample; 16 if absent. 0, with echo, tells of the prompt alone."""
    echo: bool | None = None
    """Begin each choice with its prompt; with logprobs, tell those of the prompt too."""
    logprobs: TopLogprobs | None = None
    """Tell the log-probabilities of each token and of so many of the likeliest."""
    add_special_tokens: bool | None = None
    """Begin texts with the special tokens that the tokenizer puts there; the default. (vLLM's extension.)"""
    best_of: Annotated[Any, Unsupported("all n samples are returned, choose among them", 1)] = None
    suffix: Annotated[Any, Unsupported("models here only write on; put what is to follow into the prompt", "")] = None

    def check(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        self.check_stream_options()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 tells of the prompt alone, so it needs echo: true", param="max_tokens")

    def prompts(self) -> list[str | list[int]]:
        """One or several, as texts or ids. Raises ApiError (400) unless there is exactly one kind of prompt."""
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ApiError(400, "give either prompt or prompt_token_ids", param="prompt")
        given = self.prompt_token_ids if self.prompt is None else self.prompt
        if isinstance(given, str):
            return [given]
        assert given is not None
        return [given] if isinstance(given[0], int) else list(given)


class CompletionLogprobs(ReplyModel):
    """Parallel lists with an entry for each token; null where nothing comes before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where the token begins in the text of the choice, in characters."""


class CompletionChoice(ReplyModel):
    index: int
    """Choices are counted through all prompts: those of the first one come first."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """Null in the chunks of a stream before the choice's last."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; null for the model's own end of sequence."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(AnswerModel):
    """A whole answer, or a chunk of a stream.

    In a stream `usage` is there with stream_options.include_usage only: null but in the last chunk, without choices.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
