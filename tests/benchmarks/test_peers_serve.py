"""Servers of both engines in turns: the same loads, valid lines, and no server left, whatever goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from benchmarks.peers import serve_in_turns, table
from benchmarks.peers.engines import ROOT, write_model
from benchmarks.peers.loads import LONG_KINDS, RATES, Load, loads
from benchmarks.peers.table import row_name
from strata.cli.main import app
from strata.models.shapes import SHAPES
from tests.benchmarks.conftest import FakeEngines, MakeEngines, wait_for
from tests.benchmarks.test_peers_offline import TINY
from tests.cli.fake_server import FakeServer

Compare = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Runs the comparison on a tiny shape; the lines that it saves."""
    for model in ("0.6B", "8B"):
        monkeypatch.setitem(SHAPES, model, TINY)
    monkeypatch.setattr(serve_in_turns, "end_on_signals", lambda: None)

    def run(made: FakeEngines, *options: str) -> list[dict[str, Any]]:
        saved = tmp_path / "results.jsonl"
        monkeypatch.setattr(
            sys, "argv", ["serve_in_turns.py", *made.options, "--models", "0.6B", "--save", str(saved), *options]
        )
        serve_in_turns.main()
        return [json.loads(text) for text in saved.read_text().splitlines()]

    return run


def whole(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the fake engines with the figures that a table reads."""
    return {"date": "", "commit": "", "ttft_ms": None, "tpot_ms": None, "output_tokens_per_second": 1.0, **line}


def test_both_servers_get_the_same_loads_in_turns(engines: MakeEngines, compare: Compare) -> None:
    made = engines()
    lines = compare(made, "--turns", "2", "--loads", "single,rates")
    of_kinds = [load for load in loads("0.6B") if load.kind in ("single", "rates")]
    turns = [("strata", 0), ("vllm", 0), ("vllm", 1), ("strata", 1)]
    assert [(line["engine"], line["turn"], line["load"]) for line in lines] == [
        (*turn, load.name) for turn in turns for load in of_kinds
    ]
    assert {(line["engine"], line["version"]) for line in lines} == {("strata", "strata 1.0"), ("vllm", "vllm 1.0")}
    assert len({line["run"] for line in lines}) == 1
    assert all(line["test"] == "T5" and line["device"] and " serve " in line["server"] for line in lines)
    # The load generator is Strata's for both; what it is told differs in the server's address alone.
    sent = [call for call in made.calls() if call["options"][0] == "bench"]
    assert {call["engine"] for call in sent} == {"strata"}
    asked = [call["options"][call["options"].index("--json") :] for call in sent]
    of_turn = [asked[at : at + len(of_kinds) + 1] for at in range(0, len(asked), len(of_kinds) + 1)]
    assert len(of_turn) == 4
    assert all(turn == of_turn[0] for turn in of_turn)
    wait_for(lambda: not made.alive())  # what was killed goes when it gets its turn


def test_both_servers_have_the_same_options_but_those_of_logs_and_defaults(
    engines: MakeEngines, compare: Compare
) -> None:
    made = engines()
    compare(made, "--turns", "1", "--loads", "single")
    strata, vllm = (call["options"] for call in made.servers())
    port = strata.index("--port") + 1
    strata[port] = vllm[port] = "any"
    assert vllm[: len(strata)] == strata
    own = "--generation-config vllm --no-enable-log-requests --disable-uvicorn-access-log"
    assert vllm[len(strata) :] == own.split()
    given = CliRunner().invoke(app, [*strata[:1], "nowhere", *strata[2:port], "0", *strata[port + 1 :]])
    assert "nowhere" in str(given.exception)  # all options are known: only the folder is not there


def test_both_servers_pack_weights_alike(engines: MakeEngines, compare: Compare) -> None:
    made = engines()
    lines = compare(made, "--turns", "1", "--loads", "single", "--quantization", "fp8")
    for call in made.servers():
        assert call["options"][call["options"].index("--quantization") + 1] == "fp8"
    assert [line["quantization"] for line in lines] == ["fp8", "fp8"]
    line = {"test": "T5", "model": "8B", "load": "one at a time"}
    assert row_name(line | {"quantization": "fp8"}) == "8B in fp8, one at a time"
    assert row_name(line | {"quantization": None}) == row_name(line) == "8B, one at a time"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("dies", "vLLM's server ended with exit code 3; its log ends:\nnot enough memory"),
        ("never ready", "vLLM's server was not ready within 4 s (http://127.0.0.1:"),
        ("dies under load", "vLLM's server ended with exit code 7"),
    ],
)
def test_a_server_that_fails_is_told_and_stopped(
    engines: MakeEngines, compare: Compare, tmp_path: Path, failure: str, message: str
) -> None:
    made = engines(vllm=failure)
    patience = "4" if failure == "never ready" else "60"
    with pytest.raises(SystemExit) as ended:
        compare(made, "--loads", "single", "--start-timeout", patience)
    assert str(ended.value).startswith(message)
    assert [call["engine"] for call in made.servers()] == ["strata", "vllm"]
    wait_for(lambda: not made.alive())  # what was killed goes when it gets its turn
    # What was measured before is kept.
    assert [json.loads(line)["engine"] for line in (tmp_path / "results.jsonl").read_text().splitlines()] == ["strata"]


def test_a_load_that_is_not_measured_is_told(engines: MakeEngines, compare: Compare) -> None:
    made = engines(strata="no load")
    with pytest.raises(SystemExit, match="the load 'warm-up' was not measured:\nError: no such option"):
        compare(made)
    wait_for(lambda: not made.alive())  # what was killed goes when it gets its turn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])  # SIGHUP: the terminal is closed
def test_a_signal_stops_the_server(engines: MakeEngines, tmp_path: Path, number: signal.Signals) -> None:
    made = engines(strata="never ready")
    command = [sys.executable, "-m", "benchmarks.peers.serve_in_turns", *made.options]
    command += ["--models", "0.6B", "--save", str(tmp_path / "results.jsonl")]

    def heard() -> None:
        """Under nohup, from which these tests may run, SIGHUP is ignored, and so by every process that they start."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heard, **pipes) as process:
        wait_for(made.servers)
        assert len(made.alive()) == 2
        process.send_signal(number)
        told = process.communicate(timeout=180)[1]
    assert process.returncode == 128 + number
    assert told == "" or number != signal.SIGINT
    wait_for(lambda: not made.alive())  # what was killed goes when it gets its turn


def test_what_cannot_be_measured_is_refused(
    engines: MakeEngines, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ("--models 1B", "--loads none", "--start-timeout nan", "--loads long", "--engines strata,x"):
        with pytest.raises(SystemExit):
            compare(engines(), *options.split())
    shown = capsys.readouterr().err
    assert "there are no loads for 1B" in shown
    assert "0.6B has no loads of kind long: ask for --models 8B" in shown
    assert "'x' is no engine: give some of strata, vllm" in shown
    assert "'none' is no kind of load: give some of single, rates" in shown
    assert "argument --start-timeout: give seconds over 0, not nan" in shown


@pytest.mark.parametrize("model", RATES)
def test_no_load_has_the_prompts_of_another(model: str) -> None:
    found = loads(model)
    seeds = {(load.max_model_len, load.options[load.options.index("--seed") + 1]) for load in found}
    assert len(seeds) == len({load.name for load in found}) == len(found)


ALL = [*loads("0.6B"), *(load for load in loads("8B") if load.kind in LONG_KINDS)]


@pytest.mark.parametrize("load", ALL, ids=lambda load: load.name)
def test_strata_bench_serve_takes_each_load(load: Load) -> None:
    # The last value of an option counts.
    small = ["--num-prompts", "3", "--input-len", "5", "--output-len", "2"]
    if "--request-rate" in load.options:
        small += ["--request-rate", "1000"]
    if load.kind == "agents":
        small = ["--sessions", "1", "--turns", "3", "--pause", "0"]
    with FakeServer(max_model_len=load.max_model_len) as fake:
        command = ["bench", "serve", "--url", fake.url, "--json", *load.options, *small]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
    result = json.loads(done.stdout)
    assert result["completed"] == 3
    if load.kind not in LONG_KINDS:
        assert result["max_concurrency"] == (1 if "one at" in load.name else 256 if "flight" in load.name else None)
    sets = {"shared": "shared-prefix", "cached": "shared-prefix", "lognormal": "lognormal", "agents": "agents:"}
    shared = "shared-prefix" if "shared" in load.name else "random"
    assert result["data"].split()[0] == sets.get(load.kind, shared)


def test_each_kind_has_a_server_that_takes_its_lengths(engines: MakeEngines, compare: Compare) -> None:
    made = engines()
    lines = compare(made, "--models", "8B", "--turns", "1", "--loads", "longest,long,agents")
    lengths = [call["options"][call["options"].index("--max-model-len") + 1] for call in made.servers()]
    assert lengths == ["20480", "20480", "66048", "66048", "32768", "32768"]
    assert [call["engine"] for call in made.servers()] == 3 * ["strata", "vllm"]
    of_strata = [line["load"] for line in lines if line["engine"] == "strata"]
    assert len(of_strata) == 5 + 2 + 1  # longest has a line of the closed loop that found its rate
    assert of_strata[5:7] == [of_strata[6] + ": saturation", of_strata[6]]
    assert of_strata == [line["load"] for line in lines if line["engine"] == "vllm"]
    assert table.tables([whole(line) for line in lines]).count("\n| 8B") == 8


@pytest.mark.parametrize(
    ("failure", "message"),
    [("second load", "was not measured:\nError: too long"), ("second load hangs", "did not end within 5 s")],
)
def test_a_load_that_fails_loses_none_of_the_others(
    engines: MakeEngines, compare: Compare, tmp_path: Path, failure: str, message: str
) -> None:
    options = ["--turns", "1", "--loads", "rates", "--engines", "strata", "--load-timeout", "5", "--run", "first"]
    names = [load.name for load in loads("0.6B") if load.kind == "rates"]
    with pytest.raises(SystemExit) as ended:
        compare(engines(strata=failure), *options)
    assert str(ended.value) == f"0.6B, Strata: the load {names[0]!r} {message}"
    saved = tmp_path / "results.jsonl"
    assert [json.loads(line)["load"] for line in saved.read_text().splitlines()] == names[1:]


def test_calls_of_one_name_are_one_comparison_and_go_on(engines: MakeEngines, compare: Compare) -> None:
    made = engines()
    asked = ("--turns", "1", "--run", "both", "--engines")
    for more in (["strata", "--loads", "single"], ["vllm", "--loads", "single"], ["strata,vllm", "--loads", "single"]):
        lines = compare(made, *asked, *more)
    assert [(line["engine"], line["run"]) for line in lines] == [("strata", "both"), ("vllm", "both")]
    lines = compare(made, *asked, "strata", "--loads", "single,rates")
    assert [line["load"] for line in lines[2:]] == [load.name for load in loads("0.6B") if load.kind == "rates"]
    assert len(made.servers()) == 3  # a server of which nothing is left to measure is not started
    assert len(compare(made, "--turns", "1", "--run", "another", "--engines", "strata", "--loads", "single")) == 6
    assert "only" not in table.tables([whole(line) for line in lines[:2]])


def test_the_tokenizer_knows_words_and_every_id_has_a_text(tmp_path: Path) -> None:
    write_model(tmp_path, "0.6B")
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = SHAPES["0.6B"]["vocab_size"]
    assert made.get_vocab_size() == size
    assert all(made.decode([id]) for id in range(0, size, 1001))
    encoded = made.encode("a model of words")
    assert encoded.tokens == ["a", "mod", "el", "of", "wor", "ds"]
    assert len(set(encoded.ids)) == 6
