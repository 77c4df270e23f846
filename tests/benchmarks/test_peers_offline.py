"""T1 to T4 on both engines in turns: the requests are the workloads'; tables show what was measured side by side."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import engines as setup
from benchmarks.peers import offline, offline_in_turns, table
from strata.bench import workloads
from strata.models.shapes import SHAPES
from tests.benchmarks.conftest import MakeEngines, runs

TINY = SHAPES["0.6B"] | {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": workloads.LARGEST_ID + 1,
}  # fmt: skip


class CapturingEngine:
    """A module like vLLM's, whose LLM keeps what it is asked. yields: tokens of an answer, of those asked for."""

    def __init__(self, yields: Callable[[int], int] = lambda tokens: tokens) -> None:
        self.SamplingParams = lambda **params: SimpleNamespace(**params)
        self.calls: list[tuple[list[list[int]], list[SimpleNamespace]]] = []
        self._yields = yields

    def LLM(self, **options: Any) -> CapturingEngine:
        self.options = options
        self.config = json.loads((Path(options["model"]) / "config.json").read_text())
        return self

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[SimpleNamespace]:
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        answers = [SimpleNamespace(token_ids=[0] * self._yields(one.max_tokens)) for one in params]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


@pytest.mark.parametrize("name", offline.TESTS)
def test_an_engine_gets_the_requests_of_strata_bench(name: str) -> None:
    engine, test = CapturingEngine(), workloads.named(name)
    (result,) = offline.results(engine, "8B", [test], repeat=2, more={})
    warm_up, first, second = engine.calls
    assert first[0] == [list(prompt) for prompt in test.prompts]
    assert [one.max_tokens for one in first[1]] == list(test.outputs)
    assert {(one.temperature, one.ignore_eos) for one in first[1]} == {(test.temperature, True)}
    assert second == first
    assert warm_up[0] == first[0]
    assert max(one.max_tokens for one in warm_up[1]) <= 8
    assert (result.test, result.model, result.dtype, result.unit) == (name, "8B", "bf16", test.unit)
    assert len(result.all) == 2


def test_an_engine_is_set_up_as_strata_bench_does() -> None:
    engine = CapturingEngine()
    list(offline.results(engine, "8B", [], repeat=1, more={}))
    assert engine.config == SHAPES["8B"]
    named = ("enable_prefix_caching", "dtype", "max_model_len", "load_format", "skip_tokenizer_init")
    assert [engine.options[name] for name in named] == [False, "bfloat16", 4096, "dummy", True]
    assert "tensor_parallel_size" not in engine.options
    list(offline.results(engine, "8B", [], repeat=1, more={"tensor_parallel_size": 2}))
    assert engine.options["tensor_parallel_size"] == 2


def test_too_few_tokens_are_an_error() -> None:
    engine = CapturingEngine(yields=lambda tokens: tokens - 1)
    with pytest.raises(RuntimeError, match="T2 asked for 8 output tokens and got 7"):
        list(offline.results(engine, "0.6B", [workloads.single()], repeat=1, more={}))


def test_stratas_own_llm_takes_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(workloads, "single", lambda: workloads.InferenceTest("T2", ((1, 2, 3),), (4,), unit="ms"))
    saved = tmp_path / "results.jsonl"
    options = ["--engine", "strata", "--model", "tiny", "--tests", "T2", "--repeat", "3", "--turn", "1", "--run", "now"]
    monkeypatch.setattr(sys, "argv", ["offline.py", *options, "--save", str(saved)])
    offline.main()
    (line,) = [json.loads(text) for text in saved.read_text().splitlines()]
    assert {"test", "model", "dtype", "value", "unit", "all", "floor", "device", "commit", "torch", "date"} <= set(line)
    told = [line[name] for name in ("engine", "test", "model", "run", "turn")]
    assert told == ["strata", "T2", "tiny", "now", 1]
    assert line["value"] == sorted(line["all"])[1] > 0
    assert line["command"].startswith("python -m benchmarks.peers.offline --engine strata")


def in_turns(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(offline_in_turns, "end_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["offline_in_turns.py", *options])
    offline_in_turns.main()


def test_turns_alternate_in_one_run(engines: MakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, saved = engines(), tmp_path / "results.jsonl"
    options = ["--models", "0.6B", "--turns", "3", "--tests", "T1,T3-b8", "--repeat", "2", "--save", str(saved)]
    in_turns(monkeypatch, *made.options, *options)
    lines = [json.loads(text) for text in saved.read_text().splitlines()]
    expected = [("strata", 0), ("vllm", 0), ("vllm", 1), ("strata", 1), ("strata", 2), ("vllm", 2)]
    tests = ("T1", "T3-b8")
    assert [(line["engine"], line["turn"], line["test"]) for line in lines] == [
        (*one, test) for one in expected for test in tests
    ]
    assert len({line["run"] for line in lines}) == 1
    calls = made.calls()
    assert [call["module"] for call in calls] == ["benchmarks.peers.offline"] * 6
    asked = [call["options"][: call["options"].index("--save")] for call in calls]
    rest = ["--tests", "T1,T3-b8", "--repeat", "2", "--tensor-parallel-size", "1"]
    assert asked[0] == ["--engine", "strata", "--model", "0.6B", *rest]
    assert asked[1] == ["--engine", "vllm", *asked[0][2:]]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("dies", "vLLM ended with exit code 3"),
        ("skips a test", "vLLM ended without results of T1; its output stands above"),
        ("does not end", "vLLM did not end within 2 s; its output stands above"),
    ],
)
def test_a_process_that_does_not_measure_all_ends_the_comparison(
    failure: str, message: str, engines: MakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, saved = engines(vllm=failure), tmp_path / "results.jsonl"
    older = {"engine": "vllm", "turn": 0, "run": "an older one", "test": "T1"}
    saved.write_text(json.dumps(older) + "\n" + json.dumps({"test": "T1"}) + "\n")  # the second is of `strata bench`
    options = ["--models", "0.6B", "--tests", "T1,T2", "--save", str(saved)]
    with pytest.raises(SystemExit, match=re.escape(message)):
        in_turns(monkeypatch, *made.options, *options, *["--turn-timeout", "2"] * (failure == "does not end"))
    assert [call["engine"] for call in made.calls()] == ["strata", "vllm"]
    assert not runs(made.calls()[-1]["pid"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--engine vllm", "--engine vllm: "),  # which this Python does not have
        ("--engine strata --model 0.6B,8B", "argument --model: invalid choice: '0.6B,8B'"),  # a turn is of one
    ],
)
def test_a_turn_that_cannot_be(
    options: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", *options.split(), "--save", str(tmp_path / "results.jsonl")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        offline.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--models 9B", "'9B' is no shape: give some of 8B, 70B, 1B"),
        ("--tests T1,T9", "test 'T9' is unknown"),
        ("--vllm-python /nowhere/python", "/nowhere/python cannot be run"),
        ("--save /nowhere/results.jsonl", "/nowhere/results.jsonl cannot be written"),
        ("--turns 0", "argument --turns: give a whole number from 1 on, not 0"),
        ("--repeat two", "argument --repeat: give a whole number from 1 on, not two"),
        ("--turn-timeout nan", "argument --turn-timeout: give seconds over 0, not nan"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    engines: MakeEngines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    made = engines()
    with pytest.raises(SystemExit):
        in_turns(monkeypatch, *made.options, "--save", str(tmp_path / "results.jsonl"), *options.split())
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert made.calls() == []


def test_a_python_keeps_the_links_that_its_environment_is_found_by(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert setup.interpreter(str(link)) == str(link)


def origin(engine: str, turn: int, run: str = "B") -> dict[str, Any]:
    version = {"strata": "0.1.0", "vllm": "0.25.1"}[engine]
    where = {"device": "NVIDIA H200", "date": "2026-11-22", "commit": "0123456789abcdef"}
    return {"engine": engine, "version": version, "run": run, "turn": turn, **where}


def served(engine: str, turn: int, ttft: float, tail: float, tpot: float, rate: float, **other: Any) -> dict[str, Any]:
    figures = {"ttft_ms": {"p50": ttft, "p99": tail}, "tpot_ms": {"p50": tpot}, "output_tokens_per_second": rate}
    return {
        "test": "T5", "model": "8B", "load": "10/s", "requests": 250, "completed": 250,
        **figures, **origin(engine, turn), **other,
    }  # fmt: skip


def offline_line(engine: str, turn: int, test: str, value: float, unit: str) -> dict[str, Any]:
    return {"test": test, "model": "0.6B", "dtype": "bf16", "value": value, "unit": unit, **origin(engine, turn)}


def shown(lines: list[dict[str, Any]]) -> list[str]:
    return table.tables(lines).splitlines()


ONE, OTHER = (15.0, 31.0, 4.5, 1257.0), (18.2, 29.6, 5.16, 1255.0)
NOTHING: dict[str, Any] = {"ttft_ms": None, "tpot_ms": None, "completed": 0}
AGENTS = {"load": "agents", "first_turns_ttft_ms": {"p50": 90.0}}
FAILED = "(Strata failed 250 of 250 requests) (vLLM failed 250 of 250 requests)"
OLD = [served("strata", 0, 99.0, 99.0, 9.0, 1.0, run="A"), served("vllm", 0, 99.0, 99.0, 9.0, 1.0, run="A")]
NEW = [served("strata", 0, 10.0, 20.0, 4.0, 1000.0), served("vllm", 0, 20.0, 40.0, 8.0, 500.0)]
WHOLE = [served("strata", 0, *ONE), served("vllm", 0, *OTHER)]
ALONE = served("strata", 0, 14.0, 30.0, 4.4, 1300.0, run="C")


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        pytest.param(
            [*WHOLE, served("vllm", 1, 18.4, *OTHER[1:]), served("strata", 1, 14.0, *ONE[1:])],
            [
                "| load | TTFT p50 | TTFT p99 | TPOT p50 | tok/s | ahead |",
                "|---|---|---|---|---|---|",
                "| 8B, 10/s | 14.5 / 18.3 | 31 / 29.6 | 4.5 / 5.16 | 1,257 / 1,255 | "
                "Strata: TTFT p50, TPOT p50; vLLM: TTFT p99 |",
            ],
            id="side by side, medians of turns",
        ),
        pytest.param(
            [
                served("strata", 0, *ONE, ttft_ms={"mean": 20.0, "p50": 15.0, "p99": 31.0}),
                served("strata", 0, *ONE, **AGENTS, late_turns_ttft_ms={"p50": 45.0}),
                served("vllm", 0, *ONE, **AGENTS, late_turns_ttft_ms={"p50": 90.0}),
            ],
            [
                "| load | TTFT mean | TTFT p50 | TTFT p99 | first turns' p50 | late turns' p50 | TPOT p50 | tok/s | "
                "ahead |",
                "|---|---|---|---|---|---|---|---|---|",
                "| 8B, 10/s | 20 / - | 15 / - | 31 / - | - / - | - / - | 4.5 / - | 1,257 / - | only Strata ran |",
                "| 8B, agents | - / - | 15 / 15 | 31 / 31 | 90 / 90 | 45 / 90 | 4.5 / 4.5 | 1,257 / 1,257 | Strata |",
            ],
            id="what some loads have is a column only where one has it",
        ),
        pytest.param(
            [
                served("strata", 0, 19.0, 35.0, 5.2, 1000.0, load="a"),
                served("vllm", 0, 18.0, 30.0, 5.2, 1200.0, load="a"),
                served("strata", 0, 18.0, 30.0, 5.2, 1000.0, load="b"),
                served("vllm", 0, 18.0, 30.1, 5.2, 1000.0, load="b"),
                served("strata", 0, 18.0, 30.0, 5.2, 1000.0, load="c"),
            ],
            [
                "| 8B, a | 19 / 18 | 35 / 30 | 5.2 / 5.2 | 1,000 / 1,200 | vLLM |",
                "| 8B, b | 18 / 18 | 30 / 30.1 | 5.2 / 5.2 | 1,000 / 1,000 | level |",
                "| 8B, c | 18 / - | 30 / - | 5.2 / - | 1,000 / - | only Strata ran |",
            ],
            id="one is ahead where the other is in nothing",
        ),
        pytest.param(
            [served("strata", 0, 10.0, 20.0, 4.0, 1000.0), served("vllm", 0, 1.0, 1.0, 1.0, 0.0, **NOTHING)],
            ["| 8B, 10/s | 10 / - | 20 / - | 4 / - | 1,000 / 0 | Strata (vLLM failed 250 of 250 requests) |"],
            id="failed requests are told, and a load without answers has no figures",
        ),
        pytest.param(
            [served(engine, 0, 1.0, 1.0, 1.0, 0.0, **NOTHING) for engine in ("strata", "vllm")],
            [f"| 8B, 10/s | - / - | - / - | - / - | 0 / 0 | level {FAILED} |"],
            id="both at nothing are level",
        ),
        pytest.param(
            [
                *(offline_line("strata", 0, *one) for one in (("T1", 26_000.0, "tok/s"), ("T2", 0.68, "ms"))),
                *(offline_line("vllm", 0, *one) for one in (("T1", 20_000.0, "tok/s"), ("T2", 0.34, "ms"))),
            ],
            [
                "| test | figure | ahead |",
                "|---|---|---|",
                "| T1 0.6B bf16, tok/s | 26,000 / 20,000 | Strata by 30.0% |",
                "| T2 0.6B bf16, ms | 0.68 / 0.34 | vLLM by 100.0% |",
            ],
            id="offline tests",
        ),
        pytest.param([*OLD, *NEW], shown(NEW), id="a row is of one run of both, the newest"),
        pytest.param([*OLD, NEW[0]], shown(OLD), id="a newer run of one alone does not borrow the other's figures"),
        pytest.param([*WHOLE, ALONE], shown(WHOLE)[4:], id="nor does it hide a whole one"),
        pytest.param([*WHOLE, ALONE | {"load": "new"}], shown([ALONE | {"load": "new"}])[4:], id="but for a new load"),
    ],
)
def test_the_rows_of_a_table(lines: list[dict[str, Any]], rows: list[str]) -> None:
    assert shown(lines)[-len(rows) :] == rows


def test_what_stands_above_a_table() -> None:
    assert shown([*WHOLE, served("vllm", 1, *OTHER), served("strata", 1, *ONE)])[:2] == [
        "Strata 0.1.0 (commit 0123456) / vLLM 0.25.1, in turns on one machine (NVIDIA H200, 2026-11-22); turns of "
        "each, whose medians stand here: 2; figures within 1% are level.",
        "",
    ]
    lacking = [served("strata", turn, *ONE) for turn in range(3)] + [served("vllm", turn, *OTHER) for turn in range(2)]
    assert "turns of each, whose medians stand here: 2 to 3;" in shown(lacking)[0]


def test_both_tables_come_from_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [served("strata", 0, 10.0, 20.0, 4.0, 1000.0), offline_line("strata", 0, "T1", 26_000.0, "tok/s")]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    assert capsys.readouterr().out.rstrip("\n") == table.tables(lines)
    first = [line.split("|")[1].strip() for line in shown(lines) if line.startswith("| ")]
    assert first == ["test", "T1 0.6B bf16, tok/s", "load", "8B, 10/s"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"test": "T1", "model": "8B"}', "line 1: no result of offline_in_turns or serve_in_turns"),
        ("[]", "line 1: no result"),
        ("", "has no results"),
    ],
)
def test_a_file_of_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    with pytest.raises(SystemExit, match=message) as ended:
        table.main()
    assert str(path) in str(ended.value)


@pytest.mark.parametrize("missing", ["load", "requests", "version", "model"])
def test_a_line_that_lacks_something_is_named(tmp_path: Path, missing: str) -> None:
    line = served("strata", 0, 15.0, 31.0, 4.5, 1257.0)
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps({name: line[name] for name in line if name != missing}))
    with pytest.raises(ValueError, match=f"line 2: no result of offline_in_turns or serve_in_turns: no {missing}"):
        table.read(file)
