"""How one request wants its tokens chosen and when it wants to stop, with the names and defaults of vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from strata.engine.structured_outputs import StructuredOutputsParams

# Each sample is a sequence of its own and each logprob a Python object: unbounded, one request could fill the host.
MOST_SAMPLES = 16
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. A value out of range raises ValueError.

    n: samples drawn from the same prompt, 1 to 16.
    temperature: divides the logits; 0 takes the most likely token.
    top_p: keep the fewest tokens whose probabilities reach this, in (0, 1]. (Holtzman et al. 2020)
    top_k: keep this many most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens at least this likely relative to the likeliest, in [0, 1]; 0 keeps all. (Nguyen et al. 2024)
    repetition_penalty: above 1 discourages tokens of the prompt and the output, > 0. (CTRL, Keskar et al. 2019)
    presence_penalty, frequency_penalty: subtracted from the logit of a token once it is in the output, or once for each
        time that it is; in [-2, 2].
    logit_bias: token id to what is added to its logit, in [-100, 100].
    seed: the same seed draws the same tokens whatever else runs; None draws anew each time.
    stop: a string or strings that end the output, which leaves them out unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the output, besides the model's own end-of-sequence ids.
    max_tokens: the most tokens to generate; None means up to the model's length.
    min_tokens: no end-of-sequence id, stop id or stop string ends the output before this many tokens.
    ignore_eos: go on past the model's end-of-sequence ids.
    bad_words: strings whose token sequences are never completed.
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
        self._check_filters()
        self._check_penalties()
        self._check_lengths()
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

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

    def _check_filters(self) -> None:
        _check_integer("n", self.n, 1, MOST_SAMPLES)
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (0 is greedy), got {self.temperature!r}")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        _check_integer("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_penalties(self) -> None:
        _check_number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0 (1 is none), got {self.repetition_penalty!r}")
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            for token, bias in self.logit_bias.items():
                _check_integer("a token id of logit_bias", token, 0)
                _check_number(f"logit_bias[{token}]", bias, -100, 100)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)

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
                _check_integer("a token id of stop_token_ids", token, 0)


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer:
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be {bounds}, got {value!r}")


def _check_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value!r}")


def _check_strings(name: str, values: Any) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be strings in a list, got {values!r}")
    if not all(values):
        raise ValueError(f"{name} must not hold an empty string, got {values!r}")
