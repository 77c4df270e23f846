"""`strata simulate`: results as of `strata bench serve`, its picture, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.load.measures import Figures
from strata.bench.load.report import LoadResult
from strata.cli.ending import explanation
from strata.cli.main import app, options_of
from strata.engine.engine_config import EngineConfig
from strata.engine.scheduling.config import SchedulerConfig
from strata.hardware.specs import device
from strata.plan.meta_model import find_config
from strata.plan.simulate import engine
from strata.plan.simulate.replica import EngineShape

RUNNER = CliRunner()


def simulate(*arguments: str) -> Any:
    return RUNNER.invoke(app, ["simulate", *arguments])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts of 1,024 tokens a second apart, of which the second begins as the first does, then one at the same
    time as it."""
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 3, "hash_ids": [1, 3]},
        {"timestamp": 1000, "prompt": [5, 6, 7], "output_length": 3},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_trace_is_played_and_drawn(trace: Path, tmp_path: Path) -> None:
    picture, saved = tmp_path / "load.svg", tmp_path / "results.jsonl"
    given = ("--dataset", str(trace), "--replay", "--goodput", "ttft:1000", "--json")
    result = simulate("0.6B", *given, "--plot", str(picture), "--save", str(saved))
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert json.loads(saved.read_text()) == values
    # The keys of a server's results, and a few of a simulation's.
    served = {field.name for field in LoadResult.__dataclass_fields__.values()} - {"figures"}
    assert served | set(Figures.__dataclass_fields__) <= values.keys()
    assert values["test"] == "T5 simulated"
    assert (values["completed"], values["prompt_tokens"], values["output_tokens"]) == (3, 2051, 9)
    assert values["goodput"]["share"] == 1.0
    assert 1.0 < values["seconds"] < 1.1
    # 512 tokens of the second prompt are found in the prefix cache; the last page of all is computed again.
    assert values["prefix_hits"] == pytest.approx(512 / 2051)
    assert values["ttft_ms"]["p50"] < values["ttft_ms"]["p99"]
    assert values["timeline"][-1]["seconds"] <= values["seconds"]
    assert {moment["running"] for moment in values["timeline"]} >= {0, 1}
    assert all(word in picture.read_text() for word in ("requests that wait", "requests that run", "KV pages in use"))


def test_it_is_said_where_predictions_come_from(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no probe of this machine
    found = simulate("0.6B", "--hardware", "h100", "--dataset", str(trace), "--replay")
    assert found.exit_code == 0, found.output
    assert "from calls and ceilings borrowed from NVIDIA H200, " in found.stdout
    unknown = simulate("0.6B", "--hardware", "b200", "--dataset", str(trace), "--replay").stdout
    assert unknown.count("\nfrom ") == 0
    assert "nothing was measured of b200: all times are analytic" in unknown


def test_failures_are_told(trace: Path) -> None:
    replayed = ("--dataset", str(trace), "--replay", "--data-parallel-size", "2")
    found = simulate("0.6B", *replayed, "--fail", "1@0.5:0.2", "--fail", "0@50")
    assert found.exit_code == 0, found.output
    (line,) = (one for one in found.stdout.splitlines() if one.startswith("simulated: "))
    words = "; engine 1 ends at 0.5 s for 0.2 s; engine 0 ends at 50 s for 19 s, behind the load; "
    assert line.startswith(f"simulated: 2 x h200{words}")
    values = json.loads(simulate("0.6B", *replayed, "--fail", "0@50", "--json").stdout)
    assert values["failures"] == [{"replica": 0, "at": 50.0, "down": 19.0}]


def test_saturation_counts_what_was_completed() -> None:
    """What fails because no engine is left ends at once, and is no rate that an engine sustains."""
    load = ("--num-prompts", "60", "--max-concurrency", "4", "--request-rate", "50%", "--fail", "0@0.05")
    said = str(simulate("0.6B", *load).exception)
    assert re.search(r"with 12 requests or more, of which \d+ were completed", said), said


def test_shares_of_saturation_are_of_the_one_that_is_told() -> None:
    load = ("--num-prompts", "40", "--max-concurrency", "8", "--request-rate", "50%")
    saturated, offered = (json.loads(line) for line in simulate("0.6B", *load, "--json").stdout.splitlines())
    assert offered["request_rate"] == pytest.approx(saturated["saturation"] / 2)
    assert saturated["requests_per_second"] == pytest.approx(saturated["saturation"], rel=0.1)
    shown = simulate("0.6B", *load).stdout
    (told,) = re.findall(r"saturation (\S+) requests/s", shown)
    assert shown.count(f" (50% of {told})") == 2  # of the load, and in the table of all


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused does not depend on what steps take."""
    shape = EngineShape(SchedulerConfig(256, 8192, 40960), 4000, 16, caches=True)
    prices: Any = None
    made = engine.PredictedEngine(shape, prices, prices, ())
    monkeypatch.setattr(engine, "predicted_engine", lambda *_: made)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--dataset {empty}", "has no requests: give a JSON object a line, with one of prompt"),
        ("--dataset {foreign}", "line 1"),  # what else a line may lack: tests/bench/test_load.py
        ("--dataset {text}", "give prompt as token ids, or input_length"),
        ("--fail soon", "give ENGINE@SECONDS or ENGINE@SECONDS:DOWN"),
        ("--fail 0@1.2.3", "give ENGINE@SECONDS or ENGINE@SECONDS:DOWN"),
        ("--fail 3@1", "engine 3 fails, but engines count from 0 to 0"),
        ("--input-len 50000", "max_model_len is 40960"),
        ("--input-len 1000000000000", "max_model_len is 40960: lower --input-len or --output-len"),
        ("--dataset lognormal --longest 1000000000000", "max_model_len is 40960: lower --longest"),
        ("--dataset {endless}", "request 2 has 1000000000000 tokens and 128 of its answer"),
        ("--dataset nowhere", "--dataset is random, shared-prefix, lognormal, agents or a JSON-lines file"),
        ("--hardware h2000", "--hardware 'h2000' is unknown; give one of h200, h100,"),
        (
            "--hardware cpu",
            "steps of processors are not simulated, those of Strata's CUDA kernels are; give one of h200",
        ),
        ("--replay", "it needs --dataset"),
        ("--prefix-len 100", "--prefix-len is of --dataset shared-prefix: leave it out with --dataset random"),
        ("--dataset lognormal --output-len 3000", "--output-len 3000 is the mean of lengths that --longest"),
    ],
)
def test_what_cannot_be_played_is_said(arguments: str, said: str, tmp_path: Path) -> None:
    lines = {
        "empty": "",
        "text": '{"prompt": "Hello"}',
        "endless": '{"input_length": 5}\n{"input_length": 1000000000000}',
        "foreign": "time,tokens\n1,2",
    }
    files = {name: tmp_path / f"{name}.jsonl" for name in lines}
    for name, file in files.items():
        file.write_text(lines[name])
    result = simulate("0.6B", *arguments.format(**files).split())
    assert result.exit_code != 0
    assert said in str(result.exception)


def told(result: Any) -> str:
    """As the command prints it."""
    assert isinstance(result.exception, ValueError)
    return explanation(result.exception, lambda: options_of(["simulate"])) or ""


def test_weights_that_do_not_fit_are_said_with_options_that_have_room() -> None:
    """Of 8B on a tenth of an H200; the options that are named have room, and they alone."""
    given = ("--max-model-len", "4000", "--gpu-memory-utilization", "0.105", "--num-prompts", "2")
    first, *ledger = told(simulate("8B", *given)).splitlines()
    assert re.search(r"^the weights alone do not fit: they need 14\.9\d GiB, and 13\.\d+ of NVIDIA H200 may be", first)
    assert first.endswith("or give --tensor-parallel-size 2 or --quantization fp8")
    assert [line.split()[0] for line in ledger[:2]] == ["memory", "weights"]
    words = ("--tensor-parallel-size", "2", "--output-len", "2", "--input-len", "9", "--json")
    assert simulate("8B", *given, *words).exit_code == 0
    half = ("--max-model-len", "4000", "--gpu-memory-utilization", "0.05")
    for words in ((), ("--tensor-parallel-size", "4")):
        first = told(simulate("8B", *half, *words)).splitlines()[0]
        assert first.endswith("or give --tensor-parallel-size 8" + " or --quantization fp8" * bool(words))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("option", ["--num-prompts", "--data-parallel-size", "--prefix-groups"])
def test_more_than_memory_holds_is_refused(option: str) -> None:
    result = simulate("0.6B", option, str(10**12))
    assert isinstance(result.exception, ValueError)
    assert f"{option} 1000000000000 is more than can be simulated; give 10000" in str(result.exception)


@pytest.mark.usefixtures("no_model")
def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    saved = tmp_path / "results.jsonl"
    assert simulate("0.6B", "--input-len", "50000", "--save", str(saved)).exit_code != 0
    assert not list(tmp_path.iterdir())
    saved.write_text("{}\n")
    assert simulate("0.6B", "--input-len", "50000", "--save", str(saved)).exit_code != 0
    assert saved.read_text() == "{}\n"


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"]
)
def test_other_ways_of_ranks_are_not_simulated(name: str) -> None:
    asked = EngineConfig("V2-Lite", tensor_parallel_size=2, **{name: 2})
    with pytest.raises(ValueError, match=f"{name}=2 is not simulated; only tensor_parallel_size is"):
        engine.predicted_engine(asked, find_config("V2-Lite"), device("h200"))
