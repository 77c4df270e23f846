"""Callers of one LLM at once, stages in a pipeline, and interrupts at any moment: nothing is lost or uncomputed."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine import collect, loop
from strata.engine.collect import Collector
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.outputs import RequestOutput
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.runner import Launched
from strata.engine.scheduling import builder, growth, prefixes, queues, scheduler
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler

from .simulated import (
    LONGEST,
    Device,
    SimulatedRunner,
    SimulatedStep,
    Simulation,
    Unchecked,
    drive,
    linear,
    load,
    uncrowded,
)

PROMPTS = [{"prompt_token_ids": [(7 * place + 31 * index) % 300 for place in range(12)]} for index in range(3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=1, prompt_logprobs=0),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
]


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    made = LLM(folder, device="cpu", dtype="float32", num_pages=100, enable_prefix_caching=False, deterministic=True)
    made.engine.loop._run_ahead = request.param
    return made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def told(output: RequestOutput) -> Any:
    """All but times and ids of requests."""
    samples = [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs]
    return samples, output.prompt_logprobs, output.finished


def streams(llm: LLM) -> list[Iterator[RequestOutput]]:
    return [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def assert_nothing_is_left(llm: LLM) -> None:
    assert llm.engine.loop.idle
    llm.engine.loop.scheduler.check()
    assert llm.engine.pages.free == llm.engine.pages.num_pages


@pytest.mark.parametrize("seed", range(4))
def test_streams_read_side_by_side_lose_nothing(llm: LLM, alone: list[RequestOutput], seed: int) -> None:
    draw = random.Random(seed)
    open_ones, last = dict(enumerate(streams(llm))), {}
    while open_ones:
        index = draw.choice(list(open_ones))
        output = next(open_ones[index], None)
        if output is None:
            del open_ones[index]
        else:
            assert index not in last or told(output) != told(last[index]), "an output that is not new"
            last[index] = output
    assert [told(last[index]) for index in range(3)] == [told(output) for output in alone]
    assert_nothing_is_left(llm)


def test_whatever_runs_inside_a_stream_leaves_it_whole(llm: LLM, alone: list[RequestOutput]) -> None:
    vector = llm.embed(PROMPTS[1], use_tqdm=False)[0].outputs.embedding
    message = [{"role": "user", "content": "fox"}]
    answer = llm.chat(message, PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids
    last = None
    for place, output in enumerate(llm.stream(PROMPTS[0], PARAMS[0])):
        last = output
        if place == 1:
            inside = llm.generate(PROMPTS[1:], PARAMS[1:], use_tqdm=False)
            assert [told(one) for one in inside] == [told(one) for one in alone[1:]]
        if place == 2:
            assert llm.embed(PROMPTS[1], use_tqdm=False)[0].outputs.embedding == vector
            assert llm.chat(message, PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids == answer
    assert last is not None
    assert told(last) == told(alone[0])
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("closed", range(3))
def test_closing_a_stream_disturbs_no_other(llm: LLM, alone: list[RequestOutput], closed: int) -> None:
    opened = streams(llm)
    for stream in opened:
        next(stream)
    opened[closed].close()  # type: ignore[attr-defined]
    assert not llm.engine.loop.idle
    for index in {0, 1, 2} - {closed}:
        *_, last = opened[index]
        assert told(last) == told(alone[index])
    assert_nothing_is_left(llm)


def test_a_refused_prompt_disturbs_no_stream(llm: LLM, alone: list[RequestOutput]) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate([PROMPTS[1], {"prompt_token_ids": [5] * 256}], PARAMS[2], use_tqdm=False)
    *_, last = stream
    assert told(last) == told(alone[0])
    assert_nothing_is_left(llm)


def test_a_stream_that_is_closed_during_a_step_ends_before_the_next(llm: LLM, alone: list[RequestOutput]) -> None:
    """As when the garbage collector, which runs at any time, finds a stream that nobody reads any more."""
    loop = llm.engine.loop
    left = llm.stream(PROMPTS[1], PARAMS[1])
    next(left)
    schedule = loop.scheduler.schedule

    def closing(now: float) -> Any:
        left.close()  # type: ignore[attr-defined]
        assert loop.scheduler.running, "it must not be ended while the scheduler is at work"
        return schedule(now)

    loop.scheduler.schedule = closing  # type: ignore[method-assign]
    try:
        output = llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0]
    finally:
        del loop.scheduler.schedule
    assert told(output) == told(alone[0])
    assert_nothing_is_left(llm)


def test_a_second_thread_is_refused_while_a_call_is_under_way(llm: LLM, alone: list[RequestOutput]) -> None:
    runner = llm.engine.loop._runner
    launch, launched, go_on = runner.launch, threading.Event(), threading.Event()
    got: list[RequestOutput] = []

    def waiting(plan: Any) -> Any:
        launched.set()
        assert go_on.wait(30)
        return launch(plan)

    runner.launch = waiting  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: got.extend(llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)))
    thread.start()
    try:
        assert launched.wait(30)
        for call in (
            lambda: llm.generate(PROMPTS[1], PARAMS[1], use_tqdm=False),
            lambda: next(llm.stream(PROMPTS[1], PARAMS[1])),
            lambda: llm.embed(PROMPTS[1], use_tqdm=False),
        ):
            with pytest.raises(RuntimeError, match="one call at a time"):
                call()
    finally:
        go_on.set()
        thread.join(30)
        del runner.launch
    assert told(got[0]) == told(alone[0])
    assert_nothing_is_left(llm)


class Stages(SimulatedRunner):
    """Each stage does its part of a step after the one before, and one step at a time."""

    def __init__(self, device: Device | Unchecked, stages: int) -> None:
        super().__init__(device, linear)
        self.free = [0.0] * stages

    def launch(self, plan: StepPlan) -> SimulatedStep:
        done = self.now
        for at, free in enumerate(self.free):
            done = max(done, free) + linear(plan) / len(self.free)
            self.free[at] = done
        self.busy_until = done
        return SimulatedStep(self, plan, self.device.launch(plan), done)


def simulated(
    requests: list[Request], stages: int, pages: int, run_ahead: bool, checked: bool = True, draws: int = 1
) -> Simulation:
    allocator = PageAllocator(pages, page_size=4)
    config = SchedulerConfig(8, 32, LONGEST, draws=draws, stages=stages)
    scheduler = Scheduler(config, allocator, PrefixTree(allocator))
    return drive(scheduler, Stages(Device(4) if checked else Unchecked(), stages), requests, run_ahead)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("pages", "draws"), [(24, 1), (24, 3), (200, 1), (200, 3)])
def test_requests_end_as_they_would_alone(stages: int, run_ahead: bool, pages: int, draws: int) -> None:
    found = simulated(load(60), stages, pages, run_ahead, draws=draws)
    for sample in found.samples:
        outputs, reason, stop = uncrowded(sample.request, sample.index, LONGEST)
        assert (sample.outputs, sample.finish_reason, sample.stop_reason) == (outputs, reason, stop)


def test_stages_work_at_once() -> None:
    """Eight sequences of 40 ids each. One stage does a step of 8 tokens in 18 ms. Each of two does its half of a step
    of 4 tokens in 7 ms, so 40 rounds of two such steps take 40 * 14 ms, and not 40 * 28 ms as one after the other."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(one), (one, 3), sampling) for one in range(8)]
    times = {stages: simulated(list(requests), stages, 200, True, checked=False).runner.now for stages in (1, 2)}
    assert times[1] == pytest.approx(40 * 0.018, rel=0.05)
    assert times[2] == pytest.approx(40 * 0.014, rel=0.1)


PROMPT = {"prompt_token_ids": [(7 * place) % 300 for place in range(75)]}
OTHER = {"prompt_token_ids": [(11 * place) % 300 for place in range(40)]}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 60, "max_num_batched_tokens": 32}


def ids_of(cleared: LLM, prompt: dict[str, list[int]] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return cleared.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return ids_of(LLM(folder, enable_prefix_caching=False, **OPTIONS))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(folder, **OPTIONS)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def cleared(shared: LLM, request: pytest.FixtureRequest) -> LLM:
    """Nothing is cached in it."""
    shared.engine.loop._run_ahead = request.param
    shared.engine.loop.scheduler.reset()
    return shared


def assert_all_is_free(cleared: LLM) -> None:
    of, allocator = cleared.engine.loop.scheduler, cleared.engine.pages
    assert cleared.engine.loop.idle
    of.check()
    assert of.running == of.waiting == 0
    assert allocator.free + allocator.idle == allocator.num_pages


@contextmanager
def raising(owner: Any, name: str, call: int, error: type[BaseException], after: bool) -> Iterator[None]:
    """The call-th call of a function raises, before or after it has done its work."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise error("stop here")

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("where", ["schedule", "complete", "launch", "wait", "append"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_prompt_answers_rightly_after_a_step_that_came_to_nothing(
    cleared: LLM, expected: list[int], where: str, call: int, after: bool, error: type[BaseException]
) -> None:
    steps = cleared.engine.loop
    owner = {"launch": steps._runner, "wait": Launched, "append": Collector}.get(where, steps.scheduler)
    with raising(owner, where, call, error, after), pytest.raises(error, match="stop here"):
        ids_of(cleared)
    assert_all_is_free(cleared)
    assert ids_of(cleared) == expected
    assert ids_of(cleared) == expected
    assert_all_is_free(cleared)


Trace = Callable[[FrameType, str, Any], Any]


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(modules: list[Any], run: Callable[[], object]) -> dict[tuple[CodeType, int], None]:
    """The lines of some modules that a run passes, in order of their first time."""
    files = {module.__file__ for module in modules}
    seen: dict[tuple[CodeType, int], None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[frame.f_code, frame.f_lineno] = None
        return trace if frame.f_code.co_filename in files else None

    with tracing(trace):
        run()
    return seen


def interrupting(code: CodeType, line: int) -> Trace:
    """Raises KeyboardInterrupt before a line is run for the first time."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    return trace


def test_an_interrupt_at_any_line_of_scheduler_and_loop_leaves_a_usable_engine(
    shared: LLM, expected: list[int]
) -> None:
    """Python raises KeyboardInterrupt between any two lines, so books that are half written are met as well."""
    shared.engine.loop._run_ahead = True
    two = SamplingParams(temperature=0, max_tokens=2, n=2, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def run() -> None:
        shared.generate([PROMPT, OTHER, PROMPT], two, use_tqdm=False)

    lines = lines_of([scheduler, growth, builder, queues, prefixes, loop, collect], run)
    assert len(lines) > 150
    for code, line in lines:
        with suppress(KeyboardInterrupt), tracing(interrupting(code, line)):
            run()
        assert ids_of(shared, params=one) == expected[:1], f"after an interrupt at {code.co_qualname}, line {line}"
        assert_all_is_free(shared)


def test_a_draw_under_a_grammar_that_came_to_nothing_leaves_the_masks_usable(cleared: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,6}"))
    want = ids_of(cleared, params=asked)
    for call in (1, 3):
        with (
            raising(cleared.engine.loop._runner, "draw", call, KeyboardInterrupt, False),
            suppress(KeyboardInterrupt),
        ):
            ids_of(cleared, params=asked)
        assert_all_is_free(cleared)
        assert ids_of(cleared, params=asked) == want


def test_leaving_a_stream_between_two_steps_leaves_nothing_uncomputed(cleared: LLM, expected: list[int]) -> None:
    stream = cleared.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert_all_is_free(cleared)
    assert ids_of(cleared) == expected


def test_a_stream_whose_leaving_is_interrupted_ends_before_the_next_step(cleared: LLM, expected: list[int]) -> None:
    stream = cleared.stream(OTHER, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    with (
        raising(cleared.engine.loop, "abort", 1, KeyboardInterrupt, False),
        pytest.raises(KeyboardInterrupt),
    ):
        stream.close()  # type: ignore[attr-defined]
    with raising(cleared.engine.loop, "step", 30, AssertionError, False):
        assert ids_of(cleared) == expected
    assert_all_is_free(cleared)


def test_who_did_not_step_learns_that_its_request_has_ended(cleared: LLM, expected: list[int]) -> None:
    stream = cleared.stream(PROMPT, GREEDY)
    next(stream)
    with (
        raising(cleared.engine.loop._runner, "launch", 1, KeyboardInterrupt, False),
        pytest.raises(KeyboardInterrupt),
    ):
        ids_of(cleared, OTHER)
    with pytest.raises(RuntimeError, match="ended unfinished"):
        next(stream)
    assert ids_of(cleared) == expected
    assert_all_is_free(cleared)
