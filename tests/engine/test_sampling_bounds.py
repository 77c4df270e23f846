"""Whatever number `SamplingParams` accepts runs to its end; Python, the engine's protocol and HTTP accept the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from strata import LLM, SamplingParams
from strata.engine.process.messages import Add
from strata.engine.sampling_params import RANGES
from strata.serve.schema.chat import ChatRequest

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}
VOCABULARY = 307


def extremes(name: str, *more: float) -> st.SearchStrategy[Any]:
    """The ends of a range and what floats have of the most extreme within it."""
    least, most = RANGES[name]
    tiny = [5e-324, 1e-310, 1e-46, 1e-45, 1e-38, 1.2e-38, 1e-7, 1e-5, 0.99999999]
    values = [least, most, *more, *(value for value in tiny if name in FRACTIONS and least <= value <= most)]
    return st.sampled_from(values)


FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
PARAMS = st.fixed_dictionaries(
    {
        "temperature": extremes("temperature", 1.0),
        "top_p": extremes("top_p"),
        "top_k": extremes("top_k", 0, 1, 2, 2**31 - 2),
        "min_p": extremes("min_p"),
        "repetition_penalty": extremes("repetition_penalty", 1.0),
        "presence_penalty": extremes("presence_penalty", 0.0),
        "frequency_penalty": extremes("frequency_penalty", 0.0),
        "logit_bias": st.none() | st.dictionaries(st.sampled_from([0, 5, 306]), extremes("logit_bias"), max_size=3),
        "seed": st.none() | extremes("seed", 0, -1, 2**32),
        "n": st.sampled_from([1, 1, 1, 2]),
        "logprobs": st.none() | extremes("logprobs"),
        "prompt_logprobs": st.none() | extremes("prompt_logprobs"),
        "min_tokens": extremes("min_tokens", 1, 5).filter(lambda value: value <= 5),
        "stop_token_ids": st.none() | st.just(list(range(VOCABULARY - 1))),
    }
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(PARAMS, min_size=6, max_size=6))
def test_every_accepted_number_runs_to_its_end_and_disturbs_nobody(
    engine: Callable[..., LLM], asked: list[dict[str, Any]]
) -> None:
    llm = engine(dtype="float32")
    params = [SamplingParams(max_tokens=5, **values) for values in asked]
    want = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    first, *others = llm.generate([PROMPT] * 7, [GREEDY, *params], use_tqdm=False)
    assert first.outputs[0].token_ids == want
    for output in others:
        assert output.error is None
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length")
            assert all(0 <= id < VOCABULARY for id in sample.token_ids)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-38, 1.2e-38, 1e-20, 1e-5, 9.99e-5])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(engine: Callable[..., LLM], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
    assert params == GREEDY
    llm = engine(dtype="float32")
    asked, want = llm.generate([PROMPT] * 2, [params, GREEDY], use_tqdm=False)
    assert asked.outputs[0].token_ids == want.outputs[0].token_ids


def test_the_least_temperature_and_top_p_take_the_likeliest_token(engine: Callable[..., LLM]) -> None:
    llm = engine(dtype="float32")
    want = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for params in ({"temperature": 1e-4}, {"top_p": 0}, {"top_p": 1e-300}, {"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1}):
        given = SamplingParams(max_tokens=4, ignore_eos=True, **params)  # type: ignore[arg-type]
        assert llm.generate(PROMPT, given, use_tqdm=False)[0].outputs[0].token_ids == want, params


@pytest.mark.parametrize("name", [name for name in RANGES if name not in ("token id", "prompt_logprobs")])
def test_http_and_the_protocol_accept_what_python_accepts(name: str) -> None:
    least, most = RANGES[name]
    below, above = least - 1, most + 1
    if name in FRACTIONS:
        below, above = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
    for value in (below, least, most, above):
        accepted = {accepts(name, value) for accepts in (_python, _protocol, _http)}
        assert accepted == {least <= value <= most}, value


def _written(name: str, value: Any) -> dict[str, Any]:
    if name == "logit_bias":
        return {name: {5: value}}
    return {name: value} | ({"max_tokens": None} if name == "min_tokens" else {})


def _python(name: str, value: Any) -> bool:
    try:
        SamplingParams(**_written(name, value))
    except ValueError:
        return False
    return True


def _protocol(name: str, value: Any) -> bool:
    add = {"type": "add", "id": "a", "prompt": [1], "params": _written(name, value)}
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=Add)
    except (msgspec.ValidationError, OverflowError):  # integers of more than 64 bits cannot even be written
        return False
    return True


def _http(name: str, value: Any) -> bool:
    fields = {"top_logprobs" if name == "logprobs" else name: value}
    if name == "logit_bias":
        fields = {name: {"5": value}}
    try:
        ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    except ValidationError:
        return False
    return True


def test_defaults_below_a_request_leave_its_max_tokens_alone() -> None:
    defaults = SamplingParams(min_tokens=10, max_tokens=None, top_k=7)
    assert (defaults.over(max_tokens=3).min_tokens, defaults.over(max_tokens=3).top_k) == (3, 7)
    assert defaults.over(max_tokens=30).min_tokens == defaults.over().min_tokens == 10
    assert defaults.over(max_tokens=30, min_tokens=20).min_tokens == 20
    with pytest.raises(ValueError, match="min_tokens"):
        defaults.over(max_tokens=3, min_tokens=5)
