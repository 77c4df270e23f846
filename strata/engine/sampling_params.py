"""How one request wants its tokens chosen and when it wants to stop, with the names and defaults of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NamedTuple

from strata.engine.grammars.structured_outputs import StructuredOutputsParams


class Range(NamedTuple):
    """The numbers that a parameter may be, both ends included."""

    least: float
    most: float


_MAX_INTEGER = 2**31 - 1  # the device counts in int32

# The ranges of all numbers, for Python, the engine's protocol and HTTP alike. Each sample is a sequence of its own and
# each logprob a Python object: unbounded, one request could fill the host. Logits must stay finite in float32.
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "n": Range(1, 16),
        "temperature": Range(0, 2),
        "top_p": Range(0, 1),
        "top_k": Range(-1, _MAX_INTEGER),
        "min_p": Range(0, 1),
        "repetition_penalty": Range(0.01, 100),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "logit_bias": Range(-100, 100),
        "seed": Range(-(2**63), 2**63 - 1),
        "max_tokens": Range(1, _MAX_INTEGER),
        "min_tokens": Range(0, _MAX_INTEGER),
        "logprobs": Range(0, 20),
        "prompt_logprobs": Range(0, 20),
        "token id": Range(0, _MAX_INTEGER),
    }
)
# What is closer to 0 than these has the effect of 0: the likeliest token. The quotients would leave float32.
MIN_TEMPERATURE = 1e-4
MIN_TOP_P = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. A value out of range (`RANGES`) raises ValueError.

    n: samples drawn from the same prompt, 1 to 16.
    temperature: divides the logits, 0 to 2; 0 takes the most likely token, and whatever is below 0.0001 becomes 0.
    top_p: keep the fewest tokens whose probabilities reach this, in [0, 1]; whatever is below 0.000001 becomes that,
        which keeps the likeliest token. (Holtzman et al. 2020)
    top_k: keep this many most likely tokens, up to 2**31 - 1; 0 or -1 keeps all.
    min_p: keep tokens at least this likely relative to the likeliest, in [0, 1]; 0 keeps all. (Nguyen et al. 2024)
    repetition_penalty: above 1 discourages tokens of the prompt and the output, 0.01 to 100. (CTRL, Keskar et al. 2019)
    presence_penalty, frequency_penalty: subtracted from the logit of a token once it is in the output, or once for each
        time that it is; in [-2, 2].
    logit_bias: token id to what is added to its logit, in [-100, 100].
    seed: the same seed draws the same tokens whatever else runs; None draws anew each time.
    stop: a string or strings that end the output, which leaves them out unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the output, besides the model's own end-of-sequence ids.
    max_tokens: the most tokens to generate; None means up to the model's length.
    min_tokens: no end-of-sequence id, stop id or stop string ends the output before this many tokens.
    ignore_eos: go on past the model's end-of-sequence ids.
    bad_words: strings that the output never completes as the tokenizer writes them, alone or with a space before.
    logprobs, prompt_logprobs: how many of the likeliest tokens to report at each position, 0 to 20 (the token that is
        there is always reported); None reports nothing.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False returns token ids only.
    structured_outputs: what the output has to be, offline (a server's requests bring a grammar that has been checked).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), RANGES[name])
        for name in ("n", "top_k", "min_tokens"):
            check_integer(name, getattr(self, name), RANGES[name])
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), RANGES[name])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")
        self._check_bias()
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(given := self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams or None, got {given!r}")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p < MIN_TOP_P:
            object.__setattr__(self, "top_p", MIN_TOP_P)

    def over(self, **given: Any) -> SamplingParams:
        """These as defaults below what a request gives. Where it gives no min_tokens, its max_tokens bounds them."""
        most = given.get("max_tokens", self.max_tokens)
        if most is not None and "min_tokens" not in given:
            given["min_tokens"] = max(0, min(self.min_tokens, most))
        return replace(self, **given)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set, empty when there is none."""
        return frozenset(self.stop_token_ids or ())

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            check_integer("a token id of logit_bias", token, RANGES["token id"])
            _check_number(f"logit_bias[{token}]", bias, RANGES["logit_bias"])

    def _check_stops(self) -> None:
        if self.stop is not None:
            _check_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in the text: leave detokenize=True, or use stop_token_ids")
        if self.bad_words is not None:
            _check_strings("bad_words", self.bad_words)
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, (list, tuple)):
                raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
            for token in self.stop_token_ids:
                check_integer("a token id of stop_token_ids", token, RANGES["token id"])


def check_integer(name: str, value: Any, accepted: Range) -> None:
    """Raises ValueError for what is no integer in a range."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or not accepted.least <= value <= accepted.most:
        raise ValueError(f"{name} must be an integer from {accepted.least} to {accepted.most}, got {value!r}")


def _check_number(name: str, value: Any, accepted: Range) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not accepted.least <= value <= accepted.most:
        raise ValueError(f"{name} must be a number from {accepted.least} to {accepted.most}, got {value!r}")


def _check_strings(name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be strings in a list, got {values!r}")
    if not all(values):
        raise ValueError(f"{name} must not hold an empty string, got {values!r}")
