"""The parameters of a request: vLLM's defaults, and one clear line for each value out of range."""

import math

import pytest

from strata.engine.sampling_params import SamplingParams

WRONG = [
    ("n", 0),
    ("n", 17),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", 2.01),
    ("temperature", 10**400),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 0.009),
    ("repetition_penalty", 100.1),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: math.nan}),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("max_tokens", 2**31),
    ("min_tokens", 2**31),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", ["ok", 3]),
    ("stop", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 7),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("bad_words", "damn"),
    ("bad_words", [""]),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("ignore_eos", 1),
    ("detokenize", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_value_out_of_range_is_one_line_that_names_it(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 16),
        ("temperature", 0),
        ("top_p", 1e-6),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 2**31 - 1),
        ("top_k", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("logit_bias", {0: -100, 5: 100.0}),
        ("seed", -(2**63)),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("stop", []),
    ],
)
def test_value_at_the_edge_of_its_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop_strings == ()
    assert params.stop_ids == frozenset()
    assert params.temperature > 0


def test_parameters_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"min_tokens \(5\).*max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_stop_reads_alike_as_string_and_as_list():
    assert SamplingParams(stop="end").stop_strings == SamplingParams(stop=["end"]).stop_strings == ("end",)
    assert SamplingParams(stop_token_ids=[3, 3, 1]).stop_ids == {1, 3}


def test_unknown_name_is_refused_and_values_are_frozen():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5
