"""A served load on the built-in model: what is sent when, what is found of it, and what the command refuses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from strata.bench.load import sweep
from strata.bench.load.arrivals import load_seeds
from strata.bench.load.request_sets import EvenLengths
from strata.bench.load.send import LoadRequest, RequestOutcome, send_all
from strata.bench.run import Setup
from strata.bench.run import engine as make_engine
from strata.bench.served.client import ClientRequest, Load, ServedEngine, delivery_times, random_load
from strata.bench.served.measure import ServedTest, numbered, served_gaps
from strata.bench.served.report import ServedGaps
from strata.bench.served.step_logs import HostStepLog
from strata.bench.served.timeline import ServedStep, split_requests, split_wall
from strata.bench.step_observers import observed
from strata.cli.main import app
from strata.engine.llm import LLM
from strata.engine.process.messages import Delta, Fault, FromEngine, Refused, Statistics, Step
from strata.models.folder import BUILTIN_FOLDER
from strata.plan.explain.measurement import StepChunk
from tests.cli.fake_server import FakeServer

SETUP = Setup(str(BUILTIN_FOLDER), None, "float32", "cpu", False)
LENGTH = EvenLengths(6, 4)
SLEEP = 0.08


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = make_engine(SETUP.llm_options() | {"enable_prefix_caching": True})
    ServedEngine(made.engine, "builtin").serve(load_of(2, math.inf), "warm-up")
    return made


def load_of(requests: int, rate: float) -> Load:
    return random_load(LENGTH, requests, rate, 7, 4096)


def served(llm: LLM, load: Load, salt: str) -> tuple[list[ClientRequest], list[ServedStep]]:
    log = HostStepLog(llm.engine.loop.clock)
    with observed(llm.engine.loop, log):
        answered = ServedEngine(llm.engine, "builtin").serve(load, salt)
    return answered, log.steps()


def test_prompts_and_arrivals_are_those_of_bench_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[LoadRequest], list[float]]] = []

    async def noted(client: Any, requests: list[LoadRequest], due: list[float], **options: Any) -> list[RequestOutcome]:
        sent.append((requests, due))
        return await send_all(client, requests, [0.0] * len(due), **options)

    monkeypatch.setattr(sweep, "send_all", noted)
    options = ["--num-prompts", "5", "--request-rate", "50,100", "--seed", "3", "--input-len", "6", "--output-len", "4"]
    with FakeServer() as fake:
        CliRunner().invoke(app, ["bench", "serve", "--url", fake.url, *options], catch_exceptions=False)
    seeds = load_seeds(3)
    next(seeds)
    assert len(sent) == 2
    for (requests, due), rate in zip(sent, (50, 100), strict=True):
        ours = random_load(EvenLengths(6, 4), 5, rate, next(seeds), 4096)
        assert ours.due == due
        bodies = [json.loads(request.body) for request in requests]
        assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(6, 4)] * 5
        assert [(len(ask.prompt), ask.output_tokens) for ask in ours.asks] == [(6, 4)] * 5
    first, second = (random_load(EvenLengths(6, 4), 5, 50, seed, 4096).asks for seed in (1, 2))
    assert not {str(ask.prompt) for ask in first} & {str(ask.prompt) for ask in second}


def test_every_request_is_answered_in_its_time_and_its_parts_add_up(llm: LLM) -> None:
    load = load_of(6, 40)
    answered, steps = served(llm, load, "adds up")
    assert [len(one.times) for one in answered] == [4] * 6
    came = [one.due - answered[0].due for one in answered]
    assert came == pytest.approx([at - load.due[0] for at in load.due])
    requests = numbered(answered, steps)
    for request, split in zip(requests, split_requests(steps, requests), strict=True):
        own = [(one, chunk) for one in steps for chunk in one.chunks if chunk.sequence == request.sequence]
        assert sum(chunk.tokens for _, chunk in own) == 6 + 4 - 1  # the last token is never read
        assert own[0][0].launched >= request.due
        assert all(one.end <= at for (one, _), at in zip(own, request.times, strict=True))
        assert min(split.ttft.values()) >= 0
        assert sum(split.ttft.values()) == pytest.approx(request.times[0] - request.due)
        assert split.tpot is not None
        assert 3 * sum(split.tpot.values()) == pytest.approx(request.times[-1] - request.times[0])
    wall = split_wall(steps, requests)
    assert wall.idle + wall.steps + wall.host == pytest.approx(wall.wall)
    assert min(wall.idle, wall.steps, wall.host) >= 0


def test_a_second_time_the_prefix_cache_knows_nothing(llm: LLM) -> None:
    for salt in ("once", "twice"):
        _, steps = served(llm, load_of(2, math.inf), salt)
        assert sum(chunk.tokens for one in steps for chunk in one.chunks if chunk.start == 0) == 2 * 6


def test_no_request_is_idle_time(llm: LLM) -> None:
    load = load_of(2, math.inf)
    answered, steps = served(llm, Load(load.asks, [0.0, 0.4]), "idle")
    wall = split_wall(steps, numbered(answered, steps))
    assert wall.wall > 0.4
    assert wall.idle == pytest.approx(0.4 - (answered[0].times[-1] - answered[0].due), abs=1e-6)


def test_a_slow_host_is_found_between_steps_and_not_in_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = llm.engine.loop.scheduler.schedule

    def slow(now: float) -> Any:
        time.sleep(SLEEP)
        return schedule(now)

    monkeypatch.setattr(llm.engine.loop.scheduler, "schedule", slow)
    answered, steps = served(llm, load_of(1, math.inf), "slow host")
    (request,) = numbered(answered, steps)
    (split,) = split_requests(steps, [request])
    assert split.ttft["queueing until launched"] >= SLEEP
    assert split.tpot is not None
    assert split.tpot["between steps"] >= SLEEP
    assert split.tpot["decode steps"] < SLEEP
    wall = split_wall(steps, [request])
    assert wall.host_gap.median >= SLEEP
    assert wall.host >= 4 * SLEEP
    assert wall.steps < 4 * SLEEP


def test_slow_steps_are_found_in_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = llm.engine.loop
    draw = runner._runner._draw

    def slow(*arguments: Any) -> Any:
        time.sleep(SLEEP)
        return draw(*arguments)

    monkeypatch.setattr(runner._runner, "_draw", slow)
    answered, steps = served(llm, load_of(1, math.inf), "slow steps")
    (split,) = split_requests(steps, numbered(answered, steps))
    assert split.ttft["prefill steps"] >= SLEEP
    assert split.tpot is not None
    assert split.tpot["decode steps"] >= SLEEP
    assert split.tpot["between steps"] < SLEEP


def test_a_load_that_is_enough_ends_early_and_leaves_nothing(llm: LLM) -> None:
    client = ServedEngine(llm.engine, "builtin")
    turns = iter(range(100))
    answered = client.serve(load_of(6, math.inf), "early", until=lambda: next(turns) == 3)
    assert 0 < sum(len(one.times) for one in answered) < 6 * 4
    assert llm.engine.loop.idle
    assert [len(one.times) for one in client.serve(load_of(6, math.inf), "again")] == [4] * 6


def frames(*told: FromEngine) -> list[tuple[float, bytes]]:
    return [(float(at), msgspec.msgpack.encode(message)) for at, message in enumerate(told)]


def test_deliveries_are_read_from_frames() -> None:
    state = Statistics()
    told = frames(
        Step([Delta("0", 0, [5]), Delta("1", 0, [6])], state), Step([], state), Step([Delta("1", 0, [7, 8])], state)
    )
    assert delivery_times(told, 2) == [[0.0], [0.0, 2.0, 2.0]]
    failed = Delta("1", 0, [], "error", error="the logits are no distribution")
    for message, said in (
        (Step([failed], state), "request 1 of the load failed: the logits"),
        (Refused("0", "too long"), "request 0 of the load was refused: too long"),
        (Fault("out of memory"), "the engine failed under the load: out of memory"),
    ):
        with pytest.raises(RuntimeError, match=said):
            delivery_times(frames(message), 2)


def test_a_request_that_the_steps_do_not_know_is_an_error() -> None:
    one = ServedStep(0, 0, 1, (StepChunk(4, 0, 6, 1),))
    assert numbered([ClientRequest(0.0, (2.0,))], [one])[0].sequence == 4
    with pytest.raises(RuntimeError, match="2 requests were served, and the steps held 1"):
        numbered([ClientRequest(0.0, (2.0,))] * 2, [one])


@pytest.fixture(scope="module")
def found() -> list[ServedGaps]:
    return list(served_gaps(SETUP, ServedTest([50.0, math.inf], 5, 0, LENGTH)))


def test_parts_of_the_whole_add_up(found: list[ServedGaps]) -> None:
    assert [one.request_rate for one in found] == [50.0, math.inf]
    for one in found:
        assert one.idle + one.split.wall == pytest.approx(one.wall)
        assert sum(one.split.breakdown().values()) == pytest.approx(one.split.wall)  # a CPU has no floor
        assert sum(kind.seconds for kind in one.steps.values()) == pytest.approx(one.split.busy)
        assert one.steps["with prompts"].tokens > one.steps["decodes alone"].tokens
        means = sum(part["mean"] for part in one.ttft.parts.values())
        assert 0 < means <= max(one.ttft.p99, sum(part["p99"] for part in one.ttft.parts.values()))
        assert one.tpot is not None
        assert 0 < one.tpot.p50 <= one.tpot.p99
        assert (one.trace, one.device != "") == (None, True)
    assert found[1].idle == pytest.approx(0, abs=1e-9)


def test_it_is_a_line_of_json(found: list[ServedGaps]) -> None:
    values = [json.loads(json.dumps(one.values())) for one in found]
    assert [value["request_rate"] for value in values] == [50.0, "inf"]
    assert {"commit", "command", "date", "device", "torch", "triton", "largest", "steps"} <= set(values[0])
    assert values[0]["split"] == asdict(found[0].split)
    assert values[0]["ttft_ms"]["parts"] == found[0].ttft.parts
    assert (values[0]["test"], values[0]["requests"], values[0]["seed"]) == ("T5", 5, 0)


def test_a_model_of_short_sequences_is_refused(folder: Path) -> None:
    setup = Setup(str(folder), None, "float32", "cpu", False)
    with pytest.raises(ValueError, match=r"have 640 tokens with their answers, and .* takes"):
        next(served_gaps(setup, ServedTest([50.0], 2, 0)))


def test_the_command_saves_a_line_for_each_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gaps.jsonl"
    given: list[ServedTest] = []

    def noted(setup: Setup, test: ServedTest) -> Any:
        given.append(test)
        measure: Callable[..., Any] = served_gaps
        return measure(setup, ServedTest(test.rates, test.requests, test.seed, LENGTH))

    monkeypatch.setattr("strata.bench.served.measure.served_gaps", noted)
    options = ["--model", "builtin", "--device", "cpu", "--request-rate", "30,60", "--num-prompts", "2", "--seed", "4"]
    done = CliRunner().invoke(app, ["bench", "gaps", "T5", *options, "--save", str(file)], catch_exceptions=False)
    assert given == [ServedTest([30.0, 60.0], 2, 4)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["request_rate"], line["requests"], line["seed"]) for line in lines] == [(30.0, 2, 4), (60.0, 2, 4)]
    assert done.stdout.count("TTFT, ms") == 2
