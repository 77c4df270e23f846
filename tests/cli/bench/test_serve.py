"""`strata bench serve`: its loads on a server, and what it makes of one that fails in every way."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.load import server
from strata.bench.load.answer import AnswerFault
from strata.bench.load.connection import HttpClient
from strata.bench.load.measures import figures
from strata.bench.load.report import LoadResult
from strata.bench.load.request_sets import Ask, encode
from strata.bench.load.send import RequestOutcome, run, send_all
from strata.bench.result import report_console
from strata.cli.main import app
from tests.cli.fake_server import FAILURES, FakeServer

NOBODY = "http://127.0.0.1:9"  # where nothing listens: what is refused must be refused before it is asked
SMALL = "--num-prompts 6 --input-len 5 --output-len 4"
AGENTS = "--dataset agents --context-len 900 --turn-input 4-9 --turn-output 2-5"


def bench(url: str, *options: str) -> list[dict[str, Any]]:
    """The results that the command prints. Raises what the command raises."""
    done = CliRunner().invoke(
        app, ["bench", "serve", "--url", url, "--json", *SMALL.split(), *options], catch_exceptions=False
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_counted_and_every_request_accounted_for(failure: str) -> None:
    kinds = {
        "429": ("HTTP 429", "come again", False),
        "error": ("error event", "the engine is gone", False),
        "cut": ("cut", "", True),
        "no [DONE]": ("cut", "without [DONE]", True),
        "short": ("length", "3 output tokens came, 4 were asked for", False),
        "hangs": ("timeout", "2 s", True),
        "not JSON": ("malformed", "", False),
    }
    with FakeServer(failures={1: failure, 3: failure}) as fake:
        client = HttpClient(fake.url)

        async def main() -> list[RequestOutcome]:
            try:
                requests = [encode(Ask([1], 4), "fake")] * 5
                return await send_all(client, requests, [0.0] * 5, max_concurrency=1, timeout=2.0)
            finally:
                client.close()

        outcomes = run(main())
    kind, message, lost = kinds[failure]
    faults = [None if one.fault is None else (one.fault.kind, one.fault.lost) for one in outcomes]
    assert faults == [None, (kind, lost), None, (kind, lost), None]
    assert message in outcomes[1].fault.message  # type: ignore[union-attr]
    found = figures(outcomes, {})
    assert (found.requests, found.completed, found.faults, found.lost) == (5, 3, {kind: 2}, 2 * lost)
    assert found.fault_messages == {kind: outcomes[1].fault.message}  # type: ignore[union-attr]


def test_without_a_server_every_request_is_lost() -> None:
    with FakeServer() as fake:
        url = fake.url

    async def main() -> list[RequestOutcome]:
        client = HttpClient(url)
        requests = [encode(Ask([1], 4), "fake")] * 3
        return await send_all(client, requests, [0.0] * 3, max_concurrency=None, timeout=5)

    assert {one.fault and (one.fault.kind, one.fault.lost) for one in run(main())} == {("connect", True)}


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    stamps = [700, 700, 800, 1000]
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": stamp, "input_length": 3 + at, "output_length": 2} for at, stamp in enumerate(stamps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer() as fake:
        done = CliRunner().invoke(
            app, ["bench", "serve", "--url", fake.url, "--dataset", str(path), "--replay", "--json"]
        )
    (result,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert (result["completed"], result["request_rate"], result["output_tokens"]) == (4, None, 8)
    first, *load = fake.arrived  # the first is the one before the load
    # None comes before its time; how late one may come depends on the machine.
    assert all(first + due < moment for moment, due in zip(load, [0.0, 0.0, 0.1, 0.3], strict=True))
    assert [len(body["prompt"]) for body in fake.bodies[1:]] == [3, 4, 5, 6]


def test_shares_of_saturation_are_measured_and_offered_in_order(tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    with FakeServer(gap=0.005) as fake:
        options = ["--request-rate", "50%,100%", "--max-concurrency", "2", "--goodput", "ttft:60000", "--save"]
        results = bench(fake.url, *options, str(saved))
    saturated, half, whole = results
    assert [json.loads(line) for line in saved.read_text().splitlines()] == results
    assert (saturated["request_rate"], saturated["max_concurrency"], saturated["test"]) == ("inf", 2, "T5")
    saturation = saturated["saturation"]
    assert 0 < saturation < 2 / (4 * 0.005)  # two at a time, four tokens each
    assert (half["request_rate"], whole["request_rate"]) == pytest.approx((saturation / 2, saturation))
    assert max(fake.under_way[:7]) == 2  # one before the loads, and the six of the first
    assert half["max_concurrency"] is None
    assert [result["goodput"]["share"] for result in results] == [1.0, 1.0, 1.0]
    assert [(result["completed"], result["lost"], result["faults"]) for result in results] == [(6, 0, {})] * 3
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 19  # no load repeats a prompt, which the prefix cache would hold


def test_concurrency_bounds_a_load_that_comes_at_once() -> None:
    # A request lasts until the last of them has come, on a busy machine too.
    with FakeServer(gap=0.05) as fake:
        bench(fake.url, "--max-concurrency", "3")
    with FakeServer(gap=0.05) as free:
        bench(free.url)
    assert (max(fake.under_way), max(free.under_way)) == (3, 6)


def test_a_load_is_that_of_its_seed() -> None:
    def asked(seed: str) -> list[Any]:
        with FakeServer() as fake:
            bench(fake.url, "--seed", seed, "--length-spread", "0.5")
        return sorted(json.dumps(body) for body in fake.bodies)

    assert asked("1") == asked("1") != asked("2")


def test_lognormal_lengths_are_asked_for_and_said() -> None:
    with FakeServer() as fake:
        (result,) = bench(fake.url, "--dataset", "lognormal", "--input-len", "40", "--longest", "60")
    lengths = {len(body["prompt"]) for body in fake.bodies}
    assert len(lengths) > 3
    assert max(lengths) <= 60
    assert result["data"] == "lognormal prompts of 40 and answers of 4 tokens on average, each at most 60"
    assert result["completed"] == 6


def test_a_tokenizer_that_makes_all_prompts_alike_is_refused() -> None:
    with FakeServer(known="x") as fake, pytest.raises(ValueError, match="2 distinct tokens") as raised:
        bench(fake.url)
    assert "prefix cache" in str(raised.value)


def test_chats_are_made_of_the_text_of_random_ids() -> None:
    with FakeServer() as fake:
        (result,) = bench(fake.url, "--endpoint", "chat")
    contents = [body["messages"][0]["content"] for body in fake.bodies]
    assert {len(content) for content in contents} == {5}  # the server's tokens are characters
    assert result["chunks"] == result["output_tokens"] == 24


def test_a_lost_request_is_an_exit_code_and_a_refused_one_is_not() -> None:
    def exit_code(failure: str) -> int:
        with FakeServer(failures={3: failure}) as fake:
            return CliRunner().invoke(app, ["bench", "serve", "--url", fake.url, *SMALL.split()]).exit_code

    assert (exit_code("cut"), exit_code("429")) == (1, 0)


def test_the_tables_say_what_failed_and_how_good_it_was() -> None:
    with FakeServer(failures={3: "429", 4: "cut"}) as fake:
        command = f"bench serve --url {fake.url} {SMALL} --goodput ttft:60000 --request-rate 200,inf".split()
        shown = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout
    assert re.search(r"4 of 6 requests completed in (0\.0*[1-9]\d*|[1-9]\S*) s", shown)  # of a short load, too
    assert "failed: 1 HTTP 429, 1 cut (1 lost)" in shown
    assert "(66.7% of requests): ttft <= 60000 ms" in shown
    assert "output tok/s (1 a chunk)" in shown
    assert "Latency (ms) against load" in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model gpt", "has no model 'gpt': --model is one of fake, other"),
        ("--request-rate 5%,x%", "--request-rate takes"),
        ("--goodput ttft=5", "--goodput takes"),
        ("--burstiness 0 --request-rate 5", "--burstiness must be above 0"),
        ("--input-len 999", "up to 1003 tokens with their answers, fake takes 1000: lower --input-len"),
        ("--dataset nowhere.jsonl", "--dataset is random, shared-prefix, lognormal, agents or a JSON-lines file"),
        ("--dataset lognormal", "up to 4096 tokens with their answers, fake takes 1000: lower --longest"),
        ("--dataset lognormal --length-spread 0.5", "--length-spread is of --dataset random, shared"),
        ("--burstiness 1e9 --request-rate 5", "at most 1,000,000, or inf for even gaps; got 1e+09"),
        ("--dataset lognormal --longest 2", "is the mean of lengths that --longest 2 cuts"),
        ("--prefix-len 100", "--prefix-len is of --dataset shared-prefix: leave it out with --dataset random"),
        ("--dataset lognormal --prefix-groups 2", "--prefix-groups is of --dataset shared-prefix"),
        ("--longest 90", "--longest is of --dataset lognormal: leave it out with --dataset random"),
        ("--dataset README.md --input-len 9", "--input-len is of --dataset random, shared-prefix, log"),
        ("--dataset /dev/null --input-len 9", "--input-len is of --dataset random, shared-prefix, log"),
        ("--burstiness 2", "--burstiness is of requests that come at a rate: give a --request-rate"),
        ("--burstiness 2 --request-rate Infinity", "--burstiness is of requests that come at a rate"),
        ("--replay", "--replay sends a file's requests"),
        ("--request-rate 50%", "raise --num-prompts or lower --max-concurrency"),
        ("--url 127.0.0.1:8000", "--url must be like http://127.0.0.1:8000"),
        ("agents --num-prompts 5", "--num-prompts is of --dataset random, shared-prefix, lognormal, a file: leave it"),
        ("agents --request-rate 5", "--request-rate is of --dataset random"),
        ("agents --endpoint chat", "--endpoint is of --dataset random"),
        ("agents --max-concurrency 2", "--max-concurrency is of --dataset random"),
        (
            "agents --turn-input 9-4",
            "--turn-input takes the least and the most, whole numbers from 1 on, like 2-5; got '9-4'",
        ),
        ("agents --turn-output 0-4", "--turn-output takes the least and the most"),
        ("agents --pause x", "--pause takes the least and the most, seconds from 0 on, like 2-5; got 'x'"),
        ("agents --pause 0-inf", "--pause takes the least and the most, seconds"),
        ("agents --context-len 13", "one turn has up to 14 tokens, more than a context of 13: raise --context-len"),
        ("agents --context-len 1001", "contexts of up to 1001 tokens, fake takes 1000: lower --context-len"),
    ],
)
def test_bad_options_are_one_clear_line(options: str, message: str) -> None:
    given = shlex.split(options.replace("agents", AGENTS) if "agents" in options else f"{SMALL} {options}")
    with FakeServer() as fake, pytest.raises(ValueError, match=re.escape(message)):
        CliRunner().invoke(app, ["bench", "serve", "--url", fake.url, *given], catch_exceptions=False)


def test_a_server_that_is_not_there_is_named() -> None:
    with FakeServer() as fake:
        url = fake.url
    with pytest.raises(ValueError, match="start one with `strata serve`") as raised:
        bench(url)
    assert url in str(raised.value)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(key="right") as fake:
        monkeypatch.delenv(server.KEY_VARIABLE, raising=False)
        with pytest.raises(ValueError, match=f"set {server.KEY_VARIABLE} \\(wrong key\\)"):
            bench(fake.url)
        monkeypatch.setenv(server.KEY_VARIABLE, "right")
        assert bench(fake.url)[0]["completed"] == 6


def test_what_the_server_has_against_the_first_request_is_told() -> None:
    with FakeServer(failures={0: "429"}) as fake, pytest.raises(ValueError, match=r"HTTP 429\): come again"):
        bench(fake.url)
    with FakeServer(tokenizes=False) as fake, pytest.raises(ValueError, match="/tokenize answered HTTP 404"):
        bench(fake.url)


def test_the_picture_has_a_point_a_rate_and_the_bounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.svg"
    with FakeServer() as fake:
        bench(fake.url, "--request-rate", "400,inf,200", "--goodput", "ttft:1000", "--plot", str(path))
    picture = path.read_text()
    assert "time to first token, ms" in picture
    assert "objective" in picture


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plot load.svg", "give it finite rates"),
        ("--plot load.svg --request-rate inf,inf", "give it finite rates"),
        ("--plot load.docx --request-rate 1", r"load\.docx: give a name that ends in \.svg or \.png"),
        ("--plot load.svg --request-rate 500 without matplotlib", "pip install matplotlib"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_measurement(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _, lacking = words.partition(" without ")
    if lacking:
        monkeypatch.setitem(sys.modules, lacking, None)
    else:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        bench(NOBODY, *given.split())
    assert list(tmp_path.iterdir()) == []


def test_what_failed_is_told_in_the_servers_words(capsys: pytest.CaptureFixture[str]) -> None:
    """A count of HTTP 503 does not say which limit of the server was reached."""
    refused = AnswerFault("HTTP 503", "the queue [of 4] is full", lost=False)
    outcomes = [RequestOutcome(0.0, 0.0, (), 0.1, 0, 0, refused)] * 2
    result = LoadResult("now", "fake", "a data set", math.inf, None, 1.0, None, 0, figures(outcomes, {}))
    report_console().print(result.shown())
    assert "HTTP 503: the queue [of 4] is full\n" in capsys.readouterr().out
