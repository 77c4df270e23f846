"""A load's arrivals, requests, answers and figures, by hand or against what others compute."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy
import pytest

from strata.bench.load.answer import Answer, AnswerFault, EventParser
from strata.bench.load.arrivals import MIN_RATE, Rate, arrival_times, parse_rates, saturation_rate
from strata.bench.load.measures import figures, parse_objectives, percentile
from strata.bench.load.request_sets import (
    Ask,
    EvenLengths,
    FileSet,
    LognormalLengths,
    RandomSet,
    SharedPrefixSet,
    encode,
    read_rows,
)
from strata.bench.load.send import RequestOutcome


def outcome(
    sent: float = 0.0, times: tuple[float, ...] = (1.0, 2.0), tokens: int = 2, fault: AnswerFault | None = None
) -> RequestOutcome:
    return RequestOutcome(sent, sent, times, times[-1] if times else sent, 10, tokens, fault)


# Arrivals


def test_poisson_gaps_have_the_rates_mean_and_a_deviation_equal_to_it() -> None:
    gaps = [
        after - before for before, after in pairwise([0.0, *arrival_times(20_000, rate=8.0, burstiness=1.0, seed=3)])
    ]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.03)
    # exponential, which a mean and deviation alone do not make: a share exp(-1) is longer than the mean
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.015)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_coefficient_of_variation(burstiness: float) -> None:
    gaps = [after - before for before, after in pairwise([0.0, *arrival_times(20_000, 8.0, burstiness, seed=3)])]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_last_of_the_arrivals_is_due_when_the_rate_says() -> None:
    assert arrival_times(50, 4.0, 0.5, seed=1)[-1] == pytest.approx(12.5)
    assert arrival_times(4, 2.0, math.inf, seed=1) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrival_times(3, math.inf, 1.0, seed=1) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [1e-300, 1e-320, 1e6])
def test_arrivals_of_extreme_shapes_end_when_the_rate_says(burstiness: float) -> None:
    """Of the smallest no gap is a float above 0: all come in bursts, and still at the rate."""
    times = arrival_times(40, 10.0, burstiness, 3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)
    if burstiness < 1:
        assert set(times) <= {0.0, times[-1]}


def test_no_shape_at_the_lowest_rate_is_beyond_what_a_float_holds() -> None:
    for burstiness, seed in product((1e-320, 0.001, 0.005, 1.0), range(40)):
        times = arrival_times(50, MIN_RATE, burstiness, seed)
        assert times == sorted(times)
        assert times[-1] == pytest.approx(50 / MIN_RATE)


def test_arrivals_are_those_of_their_seed() -> None:
    assert arrival_times(100, 4.0, 1.0, seed=1) == arrival_times(100, 4.0, 1.0, seed=1)
    assert arrival_times(100, 4.0, 1.0, seed=1) != arrival_times(100, 4.0, 1.0, seed=2)


def test_rates_are_numbers_or_shares() -> None:
    assert parse_rates("4, inf,25%") == [Rate(4.0), Rate(math.inf), Rate(0.25, of_saturation=True)]
    assert Rate(0.25, of_saturation=True).per_second(80.0) == 20.0
    assert Rate(4.0).per_second(None) == 4.0


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "nan", "1e300", "5e-324", "1e-300%", "%", "0%", "-5%", "1001%", "inf%", "nan%", "4,", "25 %%"],
)
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="--request-rate takes") as raised:
        parse_rates(text)
    assert repr(text.split(",")[-1].strip()) in str(raised.value)


def test_saturation_leaves_out_the_first_and_the_last_of_a_closed_loop() -> None:
    # 2 at a time: pairs end at 10 (a slow start), 11, 12, 13, and the last two at 15 and 20.
    ends = [10.0, 10.0, 11.0, 11.0, 12.0, 12.0, 13.0, 13.0, 15.0, 20.0]
    assert saturation_rate(ends, concurrency=2) == pytest.approx(6 / 3)
    with pytest.raises(ValueError, match="15 requests or more, of which 10"):
        saturation_rate(ends, concurrency=5)


@pytest.mark.parametrize(("concurrency", "requests"), [(4, 12), (4, 15), (16, 51), (16, 63), (256, 1000)])
def test_saturation_of_requests_that_end_together_is_that_of_whole_rounds(concurrency: int, requests: int) -> None:
    """All that are under way end at once, every two seconds, however many are left over for the last round."""
    ends = [2.0 * (1 + number // concurrency) for number in range(requests)]
    assert saturation_rate(ends, concurrency) == pytest.approx(concurrency / 2)


# What is asked


def test_random_prompts_have_the_lengths_and_are_those_of_their_seed() -> None:
    drawn = RandomSet(EvenLengths(100, 10, spread=0.5), ids=range(50, 60))
    asks = drawn.asks(500, seed=1)
    lengths = [len(ask.prompt) for ask in asks]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.05)
    assert {ask.output_tokens for ask in asks} == set(range(5, 16))
    assert {token for ask in asks for token in ask.prompt} == set(range(50, 60))
    assert asks == drawn.asks(500, seed=1)
    assert asks != drawn.asks(500, seed=2)


def test_lognormal_lengths_have_their_means_a_long_tail_and_an_end() -> None:
    asks = RandomSet(LognormalLengths(220, 190, longest=2048), ids=[1]).asks(4000, seed=1)
    prompts, outputs = [len(ask.prompt) for ask in asks], [ask.output_tokens for ask in asks]
    assert statistics.fmean(prompts) == pytest.approx(220, rel=0.06)
    assert statistics.fmean(outputs) == pytest.approx(190, rel=0.06)
    assert statistics.stdev(map(math.log, prompts)) == pytest.approx(1, rel=0.05)
    assert statistics.median(prompts) == pytest.approx(220 / math.exp(0.5), rel=0.06)
    assert max(prompts) == 2048 >= max(outputs)
    assert abs(statistics.correlation(prompts, outputs)) < 0.05


def test_prefixes_are_shared_within_a_group_and_nothing_else_is() -> None:
    asks = SharedPrefixSet(EvenLengths(20, 5), range(1000), groups=3, prefix_tokens=40).asks(30, seed=1)
    groups: dict[tuple[Any, ...], int] = {}
    for ask in asks:
        prefix = tuple(ask.prompt[:40])
        groups[prefix] = groups.get(prefix, 0) + 1
    assert sorted(groups.values()) == [10, 10, 10]
    assert len({tuple(ask.prompt[40:]) for ask in asks}) == 30
    assert {len(ask.prompt) for ask in asks} == {60}


def test_a_request_streams_exactly_so_many_tokens() -> None:
    request = encode(Ask([1, 2, 3], 9), "m")
    body = json.loads(request.body)
    assert request.path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", [1, 2, 3], 9)
    assert body["ignore_eos"] is body["stream"] is body["stream_options"]["include_usage"] is True
    messages = [{"role": "user", "content": "Hello"}]
    chat = encode(Ask(messages, 9), "m")
    assert chat.path == "/v1/chat/completions"
    assert json.loads(chat.body)["messages"] == messages
    assert "prompt" not in json.loads(chat.body)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2, column 2: not JSON: it ends too early"),
        ('{"prompt": "a" 1}', "line 2, column 16: not JSON: expected ',' or '}'"),
        ('{"prompt": "\udcff"}', "line 2, column 13: not UTF-8: byte 0xff"),
        ("{}", "has one of prompt, messages and input_length, this one has none"),
        ('{"prompt": "a", "input_length": 4}', "this one has prompt and input_length"),
        ('{"prompt": 4}', "prompt must be a text or a list of token ids, not empty, got 4"),
        ('{"prompt": ""}', 'prompt must be a text or a list of token ids, not empty, got ""'),
        ('{"messages": [], "timestamp": 9}', "messages must be the list of a chat's messages, not empty, got []"),
        ('{"input_length": -4}', "input_length must be a whole number of tokens, at least 1, got -4"),
        ('{"input_length": 0}', "input_length must be a whole number of tokens, at least 1, got 0"),
        ('{"input_length": "ten"}', 'input_length must be a whole number of tokens, at least 1, got "ten"'),
        ('{"input_length": 5, "timestamp": "noon"}', 'timestamp must be milliseconds, at least 0, got "noon"'),
        ('{"prompt": "a", "output_length": 0}', "output_length must be a whole number of tokens, at least 1, got 0"),
        ('{"input_length": 600, "hash_ids": [1]}', "names 1 blocks of 512 tokens, which input_length 600 is not of"),
        (
            '{"input_length": 9, "hash_ids": ["a", "b"' + ', "c"' * 99 + "]}",
            'a name for each 512 tokens of input_length, got ["a", "b", "c"',
        ),
        (
            '{"prompt": "a", "output_lenght": 3}',
            'there is no field "output_lenght"; accepted are one of prompt, messages',
        ),
        ('{"prompt": "a"', "line 2, column 15: not JSON: it ends too early"),
        ('{"prompt": 4, "a" 5}', "line 2, column 19: not JSON: expected ':'"),
        ("[5]", "a request is a JSON object with one of prompt, messages and input_length"),
        ('{"prompt": "a"}', "has no timestamp, which is needed here: give milliseconds"),
        ('{"prompt": "a", "timestamp": -4}', "timestamp must be milliseconds, at least 0, got -4"),
        ('{"prompt": "a", "timestamp": 4}', "timestamp 4 is before that of the line above, 5: sort the trace"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(('{"prompt": "a", "timestamp": 5}\n' + line).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="line 2") as raised:
        read_rows(path, timed=True)
    assert fault in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 250


def test_an_order_and_an_answers_length_may_be_left_out(tmp_path: Path) -> None:
    """Where nobody replays timestamps they need not rise; the length of an answer is then that of --output-len."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"input_length": 5, "timestamp": 9}\n\n{"input_length": 6, "timestamp": 4, "output_length": 3}\n')
    asks = FileSet(path, read_rows(path, timed=False), 77, range(50)).asks(2, seed=0)
    assert [(len(ask.prompt), ask.output_tokens) for ask in asks] == [(5, 77), (6, 3)]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (EvenLengths(3, 1), "prompts of 3 and answers of 1 token"),
        (EvenLengths(3, 2), "prompts of 3 and answers of 2 tokens"),
        (EvenLengths(3, 1, 0.5), "prompts of 3 (+-50%) and answers of 1 (+-50%) tokens"),
        (LognormalLengths(3, 1, 9), "prompts of 3 and answers of 1 token on average, each at most 9"),
    ],
)
def test_one_token_is_no_tokens(lengths: Any, words: str) -> None:
    assert lengths.words == words


# Reading answers

STREAM = (
    b": hello\n\ndata: one\n\nevent: x\ndata:two\ndata: three\r\n\r\nid: 4\n\ndata: f\xc3\xbcnf\r\rdata: [DONE]\n\n"
)
EVENTS = [b"one", b"two\nthree", "fünf".encode(), b"[DONE]"]


def test_events_are_the_same_in_random_frames() -> None:
    draw = random.Random(0)
    for _ in range(200):
        cuts = [0, *sorted(draw.choices(range(len(STREAM)), k=6)), len(STREAM)]
        parser = EventParser()
        assert [event for a, b in pairwise(cuts) for event in parser.append(STREAM[a:b])] == EVENTS


def test_only_text_counts_as_the_first_token() -> None:
    answer = Answer()
    for data in (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}},
    ):
        answer.append(200, b"data: " + json.dumps(data).encode() + b"\n\n")
    assert len(answer.times) == 2
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 2)
    assert answer.fault(200, asked=2) == AnswerFault("cut", "the stream ended without [DONE]", lost=True)
    answer.append(200, b"data: [DONE]\n\n")
    assert answer.fault(200, asked=2) is None


# Figures


@pytest.mark.parametrize("values", [[5.0], [1.0, 2.0], [3.0, 9.0, 4.0, 1.0, 7.0], list(range(1000))])
def test_percentiles_are_numpys(values: list[float]) -> None:
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(sorted(values), share) == pytest.approx(numpy.percentile(values, 100 * share))


def test_figures_by_hand() -> None:
    outcomes = [
        RequestOutcome(
            due=0.0, sent=0.0, times=(0.1, 0.2, 0.4), ended=0.5, prompt_tokens=10, output_tokens=4, fault=None
        ),
        RequestOutcome(due=1.0, sent=1.2, times=(1.5, 1.6), ended=1.7, prompt_tokens=20, output_tokens=2, fault=None),
        RequestOutcome(2.0, 2.0, (2.1,), 4.0, 0, 0, AnswerFault("cut", "", lost=True)),
        RequestOutcome(3.0, 3.0, (), 3.1, 0, 0, AnswerFault("HTTP 429", "slower", lost=False)),
    ]
    found = figures(outcomes, {})
    assert (found.requests, found.completed, found.lost) == (4, 2, 1)
    assert found.faults == {"cut": 1, "HTTP 429": 1}
    assert found.fault_messages == {"cut": "", "HTTP 429": "slower"}
    assert found.seconds == pytest.approx(4.0)
    assert (found.prompt_tokens, found.output_tokens, found.chunks) == (30, 6, 5)
    assert found.requests_per_second == pytest.approx(2 / 4)
    assert found.output_tokens_per_second == pytest.approx(6 / 4)
    assert found.total_tokens_per_second == pytest.approx(36 / 4)
    means = [found.ttft_ms, found.tpot_ms, found.itl_ms, found.e2e_ms, found.send_lag_ms]
    expected = [(100 + 300) / 2, (300 / 3 + 100 / 1) / 2, (100 + 200 + 100) / 3, (500 + 500) / 2, 200 / 4]
    assert [mean.mean for mean in means if mean is not None] == pytest.approx(expected)
    assert found.goodput is None


def test_goodput_by_hand() -> None:
    outcomes = [
        outcome(times=(0.10, 0.12), tokens=3),  # 100 ms, then 10 ms a token
        outcome(times=(0.30, 0.32), tokens=3),  # first token late
        outcome(times=(0.10, 0.16), tokens=3),  # 30 ms a token
        outcome(times=(0.15,), tokens=1),  # one token has no time per output token
        outcome(times=(0.10, 0.12), tokens=3, fault=AnswerFault("cut", "", lost=True)),
        outcome(sent=1.9, times=(2.0, 2.0)),
    ]
    found = figures(outcomes, {"ttft": 200.0, "tpot": 15.0}).goodput
    assert found is not None
    assert found.share == pytest.approx(3 / 6)
    assert found.requests_per_second == pytest.approx(3 / 2.0)
    late = figures(outcomes, {"e2e": 140.0}).goodput
    assert late is not None
    assert late.share == pytest.approx(2 / 6)


def test_objectives_are_milliseconds_by_name() -> None:
    assert parse_objectives("ttft:200 tpot:15") == parse_objectives("ttft:200,tpot:15") == {"ttft": 200.0, "tpot": 15.0}
    assert parse_objectives("") == {}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "itl:5", ":5"):
        with pytest.raises(ValueError, match="--goodput takes ttft, tpot, e2e"):
            parse_objectives(wrong)
