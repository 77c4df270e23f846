"""T1 to T4 on both engines: the requests are the workloads', turns alternate, lines are those of `strata bench`."""

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
from benchmarks.peers import offline, offline_in_turns
from strata.bench import workloads
from strata.models.shapes import SHAPES
from tests.benchmarks.conftest import FakeEngines, runs

TINY = SHAPES["0.6B"] | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": workloads.LARGEST_ID + 1,
}


class RecordingEngine:
    """A module like vLLM's, whose LLM keeps what it is asked. yields: tokens of an answer, of those asked for."""

    def __init__(self, yields: Callable[[int], int] = lambda tokens: tokens) -> None:
        self.SamplingParams = lambda **params: SimpleNamespace(**params)
        self.calls: list[tuple[list[list[int]], list[SimpleNamespace]]] = []
        self._yields = yields

    def LLM(self, **options: Any) -> RecordingEngine:
        self.options = options
        self.config = json.loads((Path(options["model"]) / "config.json").read_text())
        return self

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[SimpleNamespace]:
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        answers = [SimpleNamespace(token_ids=[0] * self._yields(one.max_tokens)) for one in params]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


@pytest.mark.parametrize("name", offline.TESTS)
def test_an_engine_gets_the_requests_of_strata_bench(name: str) -> None:
    engine, test = RecordingEngine(), workloads.named(name)
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
    engine = RecordingEngine()
    list(offline.results(engine, "8B", [], repeat=1, more={}))
    assert engine.config == SHAPES["8B"]
    named = ("enable_prefix_caching", "dtype", "max_model_len", "load_format", "skip_tokenizer_init")
    assert [engine.options[name] for name in named] == [False, "bfloat16", 4096, "dummy", True]
    assert "tensor_parallel_size" not in engine.options
    list(offline.results(engine, "8B", [], repeat=1, more={"tensor_parallel_size": 2}))
    assert engine.options["tensor_parallel_size"] == 2


def test_too_few_tokens_are_an_error() -> None:
    engine = RecordingEngine(yields=lambda tokens: tokens - 1)
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
    assert (line["engine"], line["test"], line["model"], line["run"], line["turn"]) == (
        "strata",
        "T2",
        "tiny",
        "now",
        1,
    )
    assert line["value"] == sorted(line["all"])[1] > 0
    assert line["command"].startswith("python -m benchmarks.peers.offline --engine strata")


def test_one_turn_is_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", "strata", "--model", "0.6B,8B", "--save", str(tmp_path / "results.jsonl")]
    monkeypatch.setattr(sys, "argv", ["offline.py", *options])
    with pytest.raises(SystemExit):
        offline.main()
    assert "argument --model: invalid choice: '0.6B,8B'" in capsys.readouterr().err


def in_turns(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(offline_in_turns, "end_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["offline_in_turns.py", *options])
    offline_in_turns.main()


def test_turns_alternate_in_one_run(
    engines: Callable[..., FakeEngines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_process_that_fails_ends_the_comparison(
    engines: Callable[..., FakeEngines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(vllm="dies")
    with pytest.raises(SystemExit, match="vLLM ended with exit code 3"):
        in_turns(monkeypatch, *made.options, "--save", str(tmp_path / "results.jsonl"))
    assert [call["engine"] for call in made.calls()] == ["strata", "vllm"]


def test_a_process_that_ends_early_does_not_pass_for_one_that_measured_all(
    engines: Callable[..., FakeEngines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, saved = engines(vllm="skips a test"), tmp_path / "results.jsonl"
    older = {"engine": "vllm", "turn": 0, "run": "an older one", "test": "T1"}
    saved.write_text(json.dumps(older) + "\n" + json.dumps({"test": "T1"}) + "\n")  # the second is of `strata bench`
    with pytest.raises(SystemExit, match=re.escape("vLLM ended without results of T1; its output stands above")):
        in_turns(monkeypatch, *made.options, "--models", "0.6B", "--tests", "T1,T2", "--save", str(saved))
    assert [call["engine"] for call in made.calls()] == ["strata", "vllm"]


def test_a_process_that_does_not_end_is_stopped(
    engines: Callable[..., FakeEngines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engines(vllm="does not end")
    options = ["--models", "0.6B", "--tests", "T2", "--turn-timeout", "2", "--save", str(tmp_path / "results.jsonl")]
    with pytest.raises(SystemExit, match="vLLM did not end within 2 s; its output stands above"):
        in_turns(monkeypatch, *made.options, *options)
    assert not runs(made.calls()[-1]["pid"])


def test_a_python_without_the_engine_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "--engine", "vllm", "--save", str(tmp_path / "results.jsonl")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        offline.main()
    assert ended.value.code == 2
    assert "--engine vllm: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "9B"], "'9B' is no shape: give some of 8B, 70B, 1B"),
        (["--tests", "T1,T9"], "test 'T9' is unknown"),
        (["--vllm-python", "/nowhere/python"], "/nowhere/python cannot be run"),
        (["--save", "/nowhere/results.jsonl"], "/nowhere/results.jsonl cannot be written"),
        (["--turns", "0"], "argument --turns: give a whole number from 1 on, not 0"),
        (["--repeat", "two"], "argument --repeat: give a whole number from 1 on, not two"),
        (["--turn-timeout", "nan"], "argument --turn-timeout: give seconds over 0, not nan"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    engines: Callable[..., FakeEngines],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    made = engines()
    with pytest.raises(SystemExit):
        in_turns(monkeypatch, *made.options, "--save", str(tmp_path / "results.jsonl"), *options)
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert made.calls() == []


def test_a_python_keeps_the_links_that_its_environment_is_found_by(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert setup.interpreter(str(link)) == str(link)
