"""Parameters of a request: vLLM's defaults, a line for each value out of range, extremes, and how samples end."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from strata import LLM
from strata.engine.process.messages import Add
from strata.engine.samples import Sample
from strata.engine.sampling_params import RANGES, SamplingParams
from strata.serve.schema.chat import ChatRequest
from strata.text.tokenizer import Tokenizer

WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, 17, 1.0, True],
    "temperature": [-0.1, math.nan, math.inf, "hot", 2.01, 10**400],
    "top_p": [-0.01, 1.01, math.nan],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [-0.01, 1.01],
    "repetition_penalty": [0.0, 0.009, 100.1, math.inf],
    "presence_penalty": [2.01],
    "frequency_penalty": [-2.01],
    "logit_bias": [[1, 2], {"1": 1.0}, {-1: 1.0}, {1: 100.5}, {1: math.nan}],
    "seed": [2**63, -(2**63) - 1, 0.5],
    "max_tokens": [2**31, 0, -1, 2.0],
    "min_tokens": [2**31, -1],
    "stop": ["", ["ok", ""], ["ok", 3], 3],
    "stop_token_ids": [[-1], ["a"], 7],
    "bad_words": ["damn", [""]],
    "logprobs": [-1, 21],
    "prompt_logprobs": [21],
    "ignore_eos": [1],
    "detokenize": [None],
}
WRONG = [(name, value) for name, values in WRONG_VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_value_out_of_range_is_one_line_that_names_it(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


EDGES: dict[str, list[Any]] = {
    "n": [16],
    "temperature": [0, 2],
    "top_p": [1e-6],
    "top_k": [-1, 2**31 - 1, 0],
    "min_p": [1],
    "presence_penalty": [-2],
    "logit_bias": [{0: -100, 5: 100.0}],
    "seed": [-(2**63)],
    "max_tokens": [None, 1],
    "logprobs": [0, 20],
    "stop": [[]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDGES.items() for value in values])
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


TEXT = "pack my box with five dozen jugs, größer 🙂"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def in_steps(sample: Sample, ids: list[int], size: int, reason: str, stop: int | None = None) -> str:
    """The text of a sample that gets `size` ids at a time and ends with the last for `reason`."""
    steps = [ids[first : first + size] for first in range(0, len(ids), size)]
    text = "".join(sample.append(step, None, None) for step in steps[:-1])
    return text + sample.append(steps[-1], reason, stop)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
class TestAnyStepSize:
    def test_all_text_is_shown(self, tokenizer: Tokenizer, size: int) -> None:
        sample = Sample.of(SamplingParams(), [], tokenizer)
        ids = tokenizer.encode(TEXT)
        assert in_steps(sample, ids, size, "length") == TEXT
        assert (sample.finish_reason, sample.stop_reason, sample.count) == ("length", None, len(ids))

    @pytest.mark.parametrize(("included", "end"), [(False, "pack my "), (True, "pack my box wi")])
    def test_a_stop_string_ends_it_for_good(self, tokenizer: Tokenizer, size: int, included: bool, end: str) -> None:
        params = SamplingParams(stop=["box wi"], include_stop_str_in_output=included)
        sample = Sample.of(params, [], tokenizer)
        ids = tokenizer.encode(TEXT)
        assert in_steps(sample, ids, size, "length") == end
        assert (sample.finish_reason, sample.stop_reason) == ("stop", "box wi")
        shorter = tokenizer.decode(ids[: sample.count - 1])
        assert "box wi" not in shorter
        assert "box wi" in tokenizer.decode(ids[: sample.count])

    @pytest.mark.parametrize("included", [False, True])
    def test_an_id_that_ends_it_is_shown_only_if_asked(self, tokenizer: Tokenizer, size: int, included: bool) -> None:
        ids = tokenizer.encode("five dozen")
        last = tokenizer.decode(ids[-1:])
        sample = Sample.of(SamplingParams(include_stop_str_in_output=included), [], tokenizer)
        shown = in_steps(sample, ids, size, "stop", ids[-1])
        assert shown == ("five dozen" if included else "five dozen".removesuffix(last))
        assert (sample.finish_reason, sample.stop_reason, sample.count) == ("stop", ids[-1], len(ids))


def test_what_was_held_back_is_shown_when_it_fails(tokenizer: Tokenizer) -> None:
    sample = Sample.of(SamplingParams(stop="five dozens"), [], tokenizer)
    shown = sample.append(tokenizer.encode("with five dozen"), None, None)
    assert shown == "with "
    assert shown + sample.fail() == "with five dozen"
    assert sample.finish_reason == "error"


def test_without_text_ids_are_counted(tokenizer: Tokenizer) -> None:
    for sample in (Sample.of(SamplingParams(detokenize=False), [], tokenizer), Sample.of(SamplingParams(), [], None)):
        assert sample.append([1, 2, 3], None, None) == ""
        assert sample.append([4], "stop", 4) == ""
        assert (sample.count, sample.finish_reason, sample.stop_reason) == (4, "stop", 4)


def test_a_process_without_a_gpu_can_use_it() -> None:
    """API processes detokenize: loading torch would cost them seconds and memory."""
    check = "import sys, strata.engine.samples, strata.engine.process.messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
