"""Sessions of turns: what each asks, that it goes on from the answer, and what is measured of them."""

from __future__ import annotations

import json
import re
import statistics
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.load.measures import figures
from strata.bench.load.send import RequestOutcome
from strata.bench.load.sessions import SessionShape
from strata.cli.main import app
from tests.cli.fake_server import FakeServer

SMALL = ["--sessions", "3", "--turns", "5", "--turn-input", "4-9", "--turn-output", "2-5", "--pause", "0-0.02"]


def agents(url: str, *options: str) -> list[dict[str, Any]]:
    """The results that the command prints."""
    command = [
        "bench",
        "serve",
        "--url",
        url,
        "--dataset",
        "agents",
        "--context-len",
        "900",
        "--json",
        *SMALL,
        *options,
    ]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_session(bodies: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Requests in the order of their sessions: each goes on from the one whose prompt its own begins with."""
    found: list[list[dict[str, Any]]] = []
    for body in bodies:
        for chain in found:
            said = chain[-1]["prompt"]
            if body["prompt"][: len(said)] == said:
                chain.append(body)
                break
        else:
            found.append([body])
    return found


def test_lengths_and_pauses_are_drawn_evenly_and_are_those_of_the_seed() -> None:
    shape = SessionShape(50, 20, (300, 2000), (100, 400), (0.0, 5.0), 32_768)
    turns = [turn for session in shape.draw(range(9), seed=1) for turn in session]
    assert len(turns) == 1000
    for values, least, most in (
        ([len(turn.new) for turn in turns], 300, 2000),
        ([turn.output_tokens for turn in turns], 100, 400),
        ([turn.pause for turn in turns], 0.0, 5.0),
    ):
        assert least <= min(values) <= max(values) <= most
        assert statistics.fmean(values) == pytest.approx((least + most) / 2, rel=0.05)
    assert shape.draw(range(9), 1) == shape.draw(range(9), 1) != shape.draw(range(9), 2)


def test_a_turn_goes_on_from_the_ids_of_the_answer_before_it() -> None:
    with FakeServer() as fake:
        (result,) = agents(fake.url)
    assert (result["completed"], result["requests"], result["lost"]) == (15, 15, 0)
    assert (result["request_rate"], result["max_concurrency"]) == (None, 3)
    assert all(body["return_token_ids"] for body in fake.bodies)
    chains = by_session(fake.bodies[1:])  # the first is the one before the load
    assert [len(chain) for chain in chains] == [5, 5, 5]
    for chain in chains:
        for before, after in pairwise(chain):
            answered = 1000 * (fake.bodies.index(before) + 1)  # the fake server's ids are of the request's number
            behind = after["prompt"][len(before["prompt"]) :]
            assert behind[: before["max_tokens"]] == [answered + at for at in range(before["max_tokens"])]
            assert 4 <= len(behind) - before["max_tokens"] <= 9


def test_no_turn_of_a_session_is_sent_before_the_one_before_it_has_its_answer() -> None:
    with FakeServer(gap=0.01) as fake:
        agents(fake.url, "--pause", "0")
    assert max(fake.under_way) == 3


def test_a_turn_that_would_pass_the_context_begins_anew() -> None:
    with FakeServer() as fake:
        (result,) = agents(fake.url, "--sessions", "1", "--turns", "12", "--context-len", "40")
    assert result["completed"] == 12
    sizes = [(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies[1:]]
    assert all(prompt + output <= 40 for prompt, output in sizes)
    chains = by_session(fake.bodies[1:])
    assert len(chains) > 1
    for chain, following in pairwise(chains):
        last, new = chain[-1], following[0]
        would_be = len(last["prompt"]) + last["max_tokens"] + len(new["prompt"]) + new["max_tokens"]
        assert would_be > 40


def test_a_turn_that_fails_is_counted_and_its_session_has_the_others() -> None:
    with FakeServer(failures={2: "429", 3: "cut"}) as fake:
        (result,) = agents(fake.url, "--sessions", "1")
    assert (result["requests"], result["completed"]) == (5, 3)
    assert result["faults"] == {"HTTP 429": 1, "cut": 1}
    # Behind the failures the session begins anew.
    assert len(fake.bodies[4]["prompt"]) <= 9 < len(fake.bodies[5]["prompt"])


def test_a_server_that_tells_no_ids_is_refused() -> None:
    with (
        FakeServer(tells_ids=False) as fake,
        pytest.raises(ValueError, match=r"0 token ids came of \d.*return_token_ids"),
    ):
        agents(fake.url)


def test_first_and_late_turns_by_hand() -> None:
    def turn(number: int, ttft: float) -> RequestOutcome:
        return RequestOutcome(0.0, 0.0, (ttft, 1.0), 1.0, 9, 2, None, number)

    found = figures([turn(1, 0.1), turn(2, 0.2), turn(3, 0.3), turn(4, 0.4), turn(1, 0.3), turn(2, 0.9)], {})
    assert found.first_turns_ttft_ms is not None
    assert found.late_turns_ttft_ms is not None
    assert found.first_turns_ttft_ms.p50 == pytest.approx(200)  # of 100 and 300
    assert found.late_turns_ttft_ms.p50 == pytest.approx(400)  # behind the third of four
    single = figures([turn(0, 0.1)], {})
    assert single.first_turns_ttft_ms is single.late_turns_ttft_ms is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--num-prompts", "5"],
            "--num-prompts is of --dataset random, shared-prefix, lognormal, a file: leave it out",
        ),
        (["--request-rate", "5"], "--request-rate is of --dataset random"),
        (["--endpoint", "chat"], "--endpoint is of --dataset random"),
        (["--max-concurrency", "2"], "--max-concurrency is of --dataset random"),
        (
            ["--turn-input", "9-4"],
            "--turn-input takes the least and the most, whole numbers from 1 on, like 2-5; got '9-4'",
        ),
        (["--turn-output", "0-4"], "--turn-output takes the least and the most"),
        (["--pause", "x"], "--pause takes the least and the most, seconds from 0 on, like 2-5; got 'x'"),
        (["--pause", "0-inf"], "--pause takes the least and the most, seconds"),
        (["--context-len", "13"], "one turn has up to 14 tokens, more than a context of 13: raise --context-len"),
        (["--context-len", "1001"], "contexts of up to 1001 tokens, fake takes 1000: lower --context-len"),
    ],
)
def test_bad_options_are_one_clear_line(options: list[str], message: str) -> None:
    with FakeServer() as fake, pytest.raises(ValueError, match=re.escape(message)):
        agents(fake.url, *options)


def test_a_simulation_says_that_it_has_no_answers() -> None:
    with pytest.raises(ValueError, match="which only a server gives"):
        CliRunner().invoke(app, ["simulate", "0.6B", "--dataset", "agents"], catch_exceptions=False)


def test_options_of_sessions_are_refused_with_other_datasets() -> None:
    with pytest.raises(ValueError, match="--turns is of --dataset agents: leave it out with --dataset random"):
        CliRunner().invoke(app, ["bench", "serve", "--turns", "3"], catch_exceptions=False)
