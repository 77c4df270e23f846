"""The benchmarks' workloads, sessions of agents among them, and floors against figures computed elsewhere."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from strata.bench import workloads
from strata.bench.load.measures import figures
from strata.bench.load.send import RequestOutcome
from strata.bench.load.sessions import SessionShape
from strata.bench.result import HostGap, make_result, report
from strata.bench.run import Setup, costs_on, floor_on, started
from strata.cli.main import app
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.models.folder import BUILTIN_FOLDER
from strata.models.quantized.calibrate.quantize import quantize
from strata.models.quantized.calibrate.settings import Rounding
from strata.plan.meta_model import find_config, meta_model
from tests.cli.fake_server import FakeServer

NAMES = ("T1", "T2", "T3-b8", "T3-b32", "T3-b128", "T4")
FLOORS = {("8B", name): value for name, value in zip(NAMES, (13_654, 3.52, 2_035, 6_101, 12_188, 55_188), strict=True)}
SMALLER = (36_274, 0.29, 18_482, 35_587, 46_299, 716_951)
FLOORS |= {("0.6B", name): value for name, value in zip(NAMES, SMALLER, strict=True)}
# Weights of a layer's output projection and MLP.
BEHIND_ATTENTION = {"8B": 4096 * 4096 + 3 * 4096 * 14336, "0.6B": 2048 * 1024 + 3 * 1024 * 3072}
TESTS = {name: workloads.named(name) for name in NAMES}


@pytest.mark.parametrize(("model", "name"), FLOORS)
def test_floors_on_the_h200_agree_with_the_published_ones(model: str, name: str) -> None:
    setup = Setup(model, None, "bfloat16", "auto", False)
    test = TESTS[name]
    seconds = floor_on(test, setup, "NVIDIA H200")
    assert seconds is not None
    # Those take all tokens of the prompts through all layers. Behind the last attention only sampled rows are run.
    saved = 2 * BEHIND_ATTENTION[model] * (sum(test.prompt_lengths) - len(test.prompts)) / 800e12
    assert test.value(seconds + saved) == pytest.approx(FLOORS[model, name], rel=0.01)


def test_floors_of_a_folder_that_is_packed_count_its_bytes(tmp_path: Path) -> None:
    quantize(BUILTIN_FOLDER, tmp_path / "int4", Rounding.of("int4", "rtn", 64, ()), [], torch.device("cpu"))
    stored = [
        sum(
            tensor.nbytes
            for path in folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()
            if ".layers." in name
        )
        for folder in (BUILTIN_FOLDER, tmp_path / "int4")
    ]
    read = []
    for folder in (BUILTIN_FOLDER, tmp_path / "int4"):
        setup = Setup(str(folder), None, "bfloat16", "auto", False)
        found = costs_on(setup, "NVIDIA H200")
        assert found is not None
        read.append(found.costs.step(Workload((1,), (2,)), 1).weights)
        model = meta_model(find_config(str(folder)), device("h200"), torch.bfloat16, folder=setup.checkpoint)
        assert model.step_costs.step(Workload((1,), (2,)), 1).weights == read[-1]
    saved = stored[0] - stored[1]
    assert saved > 0.6 * stored[0]
    assert read[0] - read[1] == pytest.approx(saved, rel=0.02)


def test_the_floor_of_two_ranks_is_half_of_one_ranks_weights() -> None:
    alone, shared = (
        floor_on(TESTS["T2"], Setup("8B", None, "bfloat16", "auto", False, ranks), "NVIDIA H200") for ranks in (1, 2)
    )
    assert alone is not None
    assert shared == pytest.approx(alone / 2, rel=2e-3)


def test_no_floor_on_a_device_that_is_not_in_the_database() -> None:
    assert floor_on(TESTS["T2"], Setup("8B", None, "bfloat16", "cpu", False), "Intel(R) Xeon(R)") is None


def test_what_ranks_send_is_told_in_the_name_of_a_test() -> None:
    setup = Setup("8B", None, "bfloat16", "cpu", False, tensor_parallel_size=2, message_dtype="fp8")
    assert setup.test_name("T4") == "T4-tp2-messages:fp8"
    assert setup.llm_options()["message_dtype"] == "fp8"


def test_offline_workload_is_nano_vllms() -> None:
    test = TESTS["T1"]
    assert (sum(test.outputs), sum(test.prompt_lengths)) == (133_966, 142_827)
    assert all(100 <= length <= 1024 for length in test.outputs + test.prompt_lengths)


def test_figures_follow_from_seconds() -> None:
    assert TESTS["T1"].value(10.0) == pytest.approx(13_396.6)
    assert TESTS["T2"].value(5.12) == pytest.approx(10.0)  # ms a token
    assert TESTS["T3-b8"].value(2.0) == pytest.approx(8 * 256 / 2)
    assert TESTS["T4"].value(1.0) == 16 * 2048


def test_tests_are_found_by_name() -> None:
    made = [workloads.offline(), workloads.single(), *map(workloads.fixed_batch, (8, 32, 128)), workloads.prefill()]
    assert list(TESTS.values()) == made
    assert [test.name for test in made] == list(NAMES)
    for unknown in ("T5", "T3", "T3-b", "T3-b0", "32"):
        with pytest.raises(ValueError, match="T3-bN"):
            workloads.named(unknown)


def test_ideal_schedule_runs_every_token_once() -> None:
    steps = list(workloads.ideal_steps((5, 2, 7), (3, 1, 2)))
    assert steps == [Workload((5, 2, 7), (5, 2, 7)), Workload((1, 1), (6, 8)), Workload((1,), (7,))]


def test_workloads_load_no_torch() -> None:
    code = "import sys, strata.bench.workloads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_result_has_every_field_and_is_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    values = [9000.0, 11000.0, 10000.0]
    result = make_result("T1", "8B", "bfloat16", values, "tok/s", "NVIDIA H200", 13_654.0, HostGap(4e-6, 2.5e-5))
    report(result.values(), result.text(), as_json=False, save=path)
    report(result.values(), result.text(), as_json=True, save=path)
    sentence, line = capsys.readouterr().out.splitlines()
    assert "10,000 tok/s" in sentence
    assert "floor 13,654 tok/s, 73% of its speed" in sentence
    assert "host gap 4.0 us a step (p99 25.0)" in sentence
    first, second = path.read_text().splitlines()
    assert first == second == line
    saved = json.loads(first)
    fields = "test model dtype value unit all floor host_gap device verdict commit torch triton command date"
    assert list(saved) == fields.split()
    assert (saved["value"], saved["dtype"], saved["all"]) == (10_000.0, "bf16", values)
    assert saved["host_gap"] == {"median": 4e-6, "p99": 2.5e-5}


def test_a_verdict_is_the_line_behind_the_figure() -> None:
    result = make_result("T2", "8B", "bfloat16", [4.0], "ms", "NVIDIA H200")
    assert replace(result, verdict="system: slow host (host)").text().splitlines()[1] == "system: slow host (host)"


def test_share_of_the_floor_is_of_speed_for_times_too() -> None:
    def share(value: float, unit: str, floor: float | None) -> float | None:
        return make_result("T2", "8B", "bfloat16", [value], unit, "", floor).share

    assert share(5.0, "ms", 4.0) == pytest.approx(0.8)
    assert share(4.0, "tok/s", 5.0) == pytest.approx(0.8)
    assert share(4.0, "s", None) is None


@pytest.mark.parametrize(("name", "longest"), [("T1", "2,011"), ("T3-b8", "768"), ("T4", "2,049")])
def test_a_model_that_reads_too_little_is_refused_before_it_starts(
    name: str, longest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine would say is of a prompt that the user has not written."""
    monkeypatch.setattr("strata.bench.run.engine", lambda options: pytest.fail("it was started"))
    monkeypatch.setattr("strata.plan.meta_model.find_config", lambda source: SimpleNamespace(longest=512))
    setup = Setup("builtin", None, "auto", "cpu", False)
    with pytest.raises(ValueError, match=f"{name} has sequences of up to {longest} tokens and builtin reads 512"):
        started(setup, workloads.named(name))


SMALL = ["--sessions", "3", "--turns", "5", "--turn-input", "4-9", "--turn-output", "2-5", "--pause", "0-0.02"]


def agents(url: str, *options: str) -> list[dict[str, Any]]:
    """The results that the command prints."""
    command = [*f"bench serve --url {url} --dataset agents --context-len 900 --json".split(), *SMALL, *options]
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
