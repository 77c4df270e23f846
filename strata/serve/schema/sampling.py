"""The fields that chat completions and completions share, and the sampling parameters they make."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, WithJsonSchema
from pydantic.fields import FieldInfo

from strata.engine.process.messages import Ready
from strata.engine.sampling_params import RANGES, SamplingParams
from strata.serve.http.errors import ApiError
from strata.serve.schema.base import RequestModel, Unsupported, described_as

MAX_STOPS = 16


def ranged(name: str) -> FieldInfo:
    """The range of a sampling parameter, as a field's constraint."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)  # type: ignore[no-any-return]


Count = Annotated[int, ranged("max_tokens")]
TokenId = Annotated[int, ranged("token id")]
Ids = Annotated[list[TokenId], Field(min_length=1)]
TokenText = Annotated[
    str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$"), described_as("a token id, written in digits")
]
LogitBias = Annotated[
    dict[TokenText, Annotated[float, ranged("logit_bias")]],
    Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
]
# As bounds, these numbers are beyond what a JSON number holds in most languages.
Seed = Annotated[int, ranged("seed"), WithJsonSchema({"type": "integer", "format": "int64"})]
# A stop string is compared with every beginning of itself, so its length costs squared.
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
StopStrings = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)],
    described_as(f"a string of 1 to 256 characters, or a list of at most {MAX_STOPS} of them"),
]
TopLogprobs = Annotated[int, ranged("logprobs")]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    """Send a last chunk with the usage of the whole request and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk (vLLM's extension); needs include_usage."""
    include_obfuscation: Annotated[Any, Unsupported("chunks are not padded", False)] = None


class GenerationFields(RequestModel):
    """Null means that a field is absent; what is absent is as the model's generation_config.json has it."""

    model: str | None = None
    """One of /v1/models; absent, the first of them."""
    temperature: Annotated[float, ranged("temperature")] | None = None
    """Divides the logits; 0 takes the most likely token."""
    top_p: Annotated[float, ranged("top_p")] | None = None
    """Draw from the fewest tokens whose probabilities reach this; 0 takes the most likely token."""
    stream: bool | None = None
    """Send server-sent events as the text comes."""
    user: str | None = None
    """Has no effect: who sends a request is known by its key."""

    seed: Seed | None = None
    """The same seed draws the same tokens, whatever else runs."""
    stop: StopStrings | None = None
    """Strings that end the output, which leaves them out."""
    top_k: Annotated[int, ranged("top_k")] | None = None
    """Draw from this many most likely tokens; 0 or -1 for all. (This and the next three are vLLM's extensions.)"""
    repetition_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    """Above 1 discourages tokens of the prompt and the output."""
    ignore_eos: bool | None = None
    """Go on past the model's end of sequence."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Of requests that came within a minute, the lowest run first; 0 if absent. Below 0 a key needs the right."""


class SamplingFields(GenerationFields):
    n: Annotated[int, ranged("n")] | None = None
    """Samples drawn from the same prompt."""
    frequency_penalty: Annotated[float, ranged("frequency_penalty")] | None = None
    """Subtracted from the logit of a token for each time that it is in the output."""
    presence_penalty: Annotated[float, ranged("presence_penalty")] | None = None
    """Subtracted from the logit of a token once it is in the output."""
    logit_bias: LogitBias | None = None
    """Token ids, as strings, to what is added to their logits."""
    stream_options: StreamOptions | None = None
    """Only with stream."""

    min_p: Annotated[float, ranged("min_p")] | None = None
    """Draw from tokens at least this likely beside the likeliest. (This and what follows are vLLM's extensions.)"""
    min_tokens: Annotated[int, ranged("min_tokens")] | None = None
    """Nothing ends the output before this many tokens."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    """Token ids that end the output."""
    bad_words: Annotated[list[StopString], Field(max_length=256)] | None = None
    """Strings that the output never completes as the tokenizer writes them, alone or with a space before."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string, or the text of the token that ended the output, in it."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; the default."""
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and the `token_ids` of each choice to the answer."""
    ledger: bool | None = None
    """Add where the request's time went, as GET /requests/{id} tells it, to the answer. (Strata's extension.)"""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_stream_options(self) -> None:
        """Raises ApiError (400) for options of a stream that was not asked for."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for requests with stream: true", param="stream_options")


# Named here as in SamplingParams; some requests do not have all of them.
_PASSED_ON = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "bad_words",
    "skip_special_tokens", "logit_bias",
)  # fmt: skip


def sampling_params(
    asked: GenerationFields,
    ready: Ready,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The fields of a request over the defaults of the model. Raises ApiError (400) if they do not go together."""
    given: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(asked, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {int(id): bias for id, bias in given["logit_bias"].items()}
    for name in ("logit_bias", "stop_token_ids"):
        check_ids(given.get(name, ()), ready.vocab_size, name)
    given.setdefault("n", 1)
    given.update(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    try:
        return ready.default_params.over(**given)
    except ValueError as error:  # each field is in its range, so it is the one that depends on another
        raise ApiError(400, str(error), param="min_tokens") from None


def check_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Raises ApiError (400) for a token id that the model does not have."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        message = f"{param}: token id {largest} is out of range: this model's ids are 0 to {vocab_size - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")
