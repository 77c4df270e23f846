"""The parts of a request's time add up to what a device with a clock of its own took, and are put down to the right
causes."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.loop import EngineLoop, StepTiming
from strata.engine.plan import Chunk, Draw, NewSequence, StepPlan
from strata.engine.request import Request, Sequence
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig, Waiting
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.watch.request_ledger import PARTS, Part, RequestLedger, ended_at
from strata.engine.watch.request_times import KEPT, MAX_TOLD, Arrival, RequestTimes
from strata.engine.watch.step_shares import StepLook, StepShares
from strata.engine.watch.step_window import Watch
from tests.engine.simulated import (
    SECONDS_A_STEP,
    SECONDS_A_TOKEN,
    Device,
    SimulatedRunner,
    Unchecked,
    linear,
    load,
)

QUEUE: tuple[Part, ...] = ("step_under_way", "slot", "pages", "step_full", "prefix")


@dataclass
class Watched:
    """until: when the host knew the last id of each request. begun: when the first step of its prompt began."""

    watch: Watch
    until: dict[str, float]
    begun: dict[str, float]
    now: float

    def of(self, name: str) -> RequestLedger:
        (ledger,) = self.watch.requests.ledgers(name, self.now)
        return ledger


def watched(
    requests: Iterable[Request],
    *,
    pages: int = 100,
    slots: int = 8,
    tokens: int = 32,
    run_ahead: bool = False,
    host: float = 0.0,
    checked: bool = True,
) -> Watched:
    """Run requests, each from its arrival on, and note where their time goes."""
    allocator = PageAllocator(pages, page_size=4)
    runner = SimulatedRunner(Device(4) if checked else Unchecked(), linear, lambda plan: host)
    scheduler = Scheduler(SchedulerConfig(slots, tokens, 64), allocator, PrefixTree(allocator))
    ledger: Any = None  # no memory is planned
    loop = EngineLoop(scheduler, runner, run_ahead, ledger, clock=lambda: runner.now)
    found = Watched(Watch(StepShares()), {}, {}, 0.0)
    times, names = found.watch.requests, {}
    left = sorted(requests, key=lambda request: request.arrival)
    while left or not loop.idle:
        if loop.idle:
            runner.now = max(runner.now, left[0].arrival)
        while left and left[0].arrival <= runner.now:
            request = left.pop(0)
            samples = loop.add(request)
            names[samples[0].id] = request.id
            times.queued(request.id, [request.id], samples, Arrival(request.arrival, *[runner.now] * 3))
            runner.device.asked.update((sample.id, (sample.index, sample.extra_key)) for sample in samples)
        output = loop.step()
        if output is None:
            continue
        found.watch.step(output.timing)
        for update in output.updates:
            if update.finish_reason is not None:
                times.sample_ended(update.sequence)
                found.until[update.sequence.request.id] = output.timing.ended
    for plan, begin, _ in runner.steps:
        for chunk in plan.chunks:
            if chunk.sequence in names:
                found.begun.setdefault(names[chunk.sequence], begin)
    found.now = runner.now
    return found


def request(name: str, prompt: int, output: int, arrival: float = 0.0, first: int = 3) -> Request:
    """Of tokens that no other prompt begins with, unless `first` is the same."""
    ids = [first, *[3 + at % 20 for at in range(prompt - 1)]]
    return Request(name, tuple(ids), SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False), 0, arrival)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_parts_add_up_to_what_the_clock_of_the_device_says(run_ahead: bool) -> None:
    requests = load(150)
    found = watched(requests, pages=40, run_ahead=run_ahead)
    preempted = 0
    for one in requests:
        ledger = found.of(one.id)
        assert ledger.seconds == pytest.approx(found.until[one.id] - one.arrival, abs=1e-9)
        assert sum(ledger.parts.values()) == pytest.approx(ledger.seconds)
        assert min(ledger.parts.values()) > 0.0
        assert ledger.first_token is not None
        assert sum(ledger.first_parts.values()) == pytest.approx(ledger.first_token)
        assert ledger.first_token <= ledger.seconds + 1e-9
        preempted += ledger.preemptions
        if one.params.n == 1 and not ledger.preemptions:
            in_line = sum(ledger.parts.get(part, 0.0) for part in ("text", *QUEUE))
            before = sum(ledger.first_parts.get(part, 0.0) for part in ("text", *QUEUE))
            assert before == pytest.approx(in_line)
            behind = ledger.first_parts.get("step_full", 0.0)
            assert before - behind - 1e-9 <= found.begun[one.id] - one.arrival <= before + 1e-9
    assert preempted > 0


def test_one_that_runs_alone_has_its_steps_and_the_gaps_between_them() -> None:
    found = watched([request("a", prompt=5, output=4)], host=0.002)
    ledger = found.of("a")
    assert ledger.parts == pytest.approx(
        {
            "prompt": 0.002 + SECONDS_A_STEP + 5 * SECONDS_A_TOKEN,
            "decode": 3 * (0.002 + SECONDS_A_STEP + SECONDS_A_TOKEN),
        }
    )  # a launch counts as part of its step
    assert (ledger.prompt_steps, ledger.decode_steps, ledger.beside) == (1, 3, 1.0)
    assert (ledger.prompt_tokens, ledger.output_tokens, ledger.finish_reason) == (5, 4, "length")


def test_what_a_prompt_of_another_adds_to_decoding() -> None:
    found = watched([request("a", 4, 6), request("b", 20, 1, arrival=0.03, first=9)])
    ledger, step = found.of("a"), SECONDS_A_STEP + 21 * SECONDS_A_TOKEN
    assert ledger.parts["decode_beside"] == pytest.approx(step * 20 / 21)
    assert ledger.parts["decode"] == pytest.approx(4 * (SECONDS_A_STEP + SECONDS_A_TOKEN) + step / 21)
    other = found.of("b").parts
    assert other["prompt"] == pytest.approx(step * 20 / 21)
    assert other["prompt_beside"] == pytest.approx(step / 21)


def test_what_those_in_line_wait_for() -> None:
    slots = watched([request("a", 4, 10), request("b", 4, 1, first=9)], slots=1)
    assert slots.of("b").parts["slot"] == pytest.approx(slots.of("a").seconds)
    pages = watched([request("a", 8, 5), request("b", 8, 5, first=9)], pages=4)
    assert pages.of("b").parts["pages"] == pytest.approx(pages.begun["b"])
    full = watched([request("a", 60, 1), request("b", 4, 1, first=9)], tokens=32)
    assert full.of("b").parts["step_full"] == pytest.approx(SECONDS_A_STEP + 32 * SECONDS_A_TOKEN)
    prefix = watched([request("a", 9, 1), request("b", 10, 1)])
    assert prefix.of("b").parts["prefix"] == pytest.approx(SECONDS_A_STEP + 9 * SECONDS_A_TOKEN)
    assert prefix.of("b").cached_tokens == 8
    ahead = watched([request("a", 4, 9), request("b", 4, 1, arrival=0.016, first=9)], run_ahead=True)
    assert ahead.of("b").parts["step_under_way"] == pytest.approx(SECONDS_A_STEP + SECONDS_A_TOKEN)


def test_one_that_is_preempted_waits_and_computes_again() -> None:
    found = watched([request("a", 8, 20), request("b", 8, 20, first=9)], pages=8)
    ledger = found.of("b")
    assert ledger.preemptions >= 1
    assert ledger.parts["preempted"] > 0.0
    assert ledger.parts["recomputed"] > 0.0
    assert ledger.seconds == pytest.approx(found.until["b"])
    assert "preempted" not in found.of("a").parts


def test_one_that_still_runs_has_a_ledger_until_now() -> None:
    times = RequestTimes(has_floor=True)
    sequence = Sequence(0, request("a", 4, 9), 0, 64, list(range(4)), 4)
    times.queued("a", ["x"], [sequence], Arrival(1.0, 1.5, 2.0, 2.25))
    (ledger,) = times.ledgers("x", 3.0)
    assert ledger.parts == {"text": 0.5, "inbox": 0.5, "grammar": 0.25, "step_under_way": 0.75}
    assert (ledger.seconds, ledger.finish_reason, ledger.first_token) == (2.0, None, None)
    assert not times.ledgers("a", 3.0)


def test_one_that_came_while_a_step_ran_has_a_ledger_of_all_its_time() -> None:
    times = RequestTimes(has_floor=False)
    for number, name, queued in ((0, "a", 0.0), (1, "b", 2.0)):
        sequence = Sequence(number, request(name, 4, 9), 0, 64, list(range(4)), 4)
        times.queued(name, [name], [sequence], Arrival(*[queued] * 4))
    plan = StepPlan((), (), (Chunk(0, 0, 0, 4, (), 0, (0,)),), (), 4)
    times.step(StepTiming(plan, (Waiting(),), planned=1.0, launched=1.0, ended=4.0), StepLook())
    assert times.ledgers("b", 5.0)[0].parts == {"step_under_way": 3.0}
    times.request_ended("b", 6.0)
    assert times.ledgers("b", 9.0)[0].seconds == 4.0


@pytest.mark.parametrize("drawn", [[7], []])
def test_a_draw_that_gave_no_id_is_no_first_token(drawn: list[int]) -> None:
    times = RequestTimes(has_floor=False)
    sequence = Sequence(0, request("a", 4, 9), 0, 64, list(range(4)), 4)
    times.queued("a", ["a"], [sequence], Arrival(*[0.0] * 4))
    plan = StepPlan((), (NewSequence(0, 0, (), 4, 0),), (Chunk(0, 0, 0, 4, (Draw(0, 0),), 0, (0,)),), (), 4)
    sequence.tokens += drawn
    times.step(StepTiming(plan, (Waiting(),), planned=1.0, launched=1.0, ended=4.0), StepLook())
    times.sample_ended(sequence)
    (ledger,) = times.ledgers("a", 5.0)
    assert ledger.first_token == (4.0 if drawn else None)
    assert bool(ledger.first_parts) == bool(drawn)


def test_the_parts_of_one_that_ended_elsewhere() -> None:
    parts: dict[Part, float] = {"prompt": 1.0, "decode": 2.0, "decode_beside": 0.5}
    assert ended_at(parts, 3.5, 3.75) == {**parts, "delivery": 0.25}
    assert ended_at(parts, 3.5, 1.25) == {"prompt": 1.0, "decode": 0.0, "decode_beside": 0.25}


def test_only_the_newest_are_kept() -> None:
    times = RequestTimes(has_floor=False, kept=2)
    for number in range(4):
        sequence = Sequence(number, request(str(number), 4, 1), 0, 64, list(range(4)), 4)
        times.queued(str(number), ["all", str(number)], [sequence], Arrival(0.0, 0.0, 0.0, 0.0))
        times.request_ended(str(number), 1.0)
    assert [len(times.ledgers(str(number), 1.0)) for number in range(4)] == [0, 0, 1, 1]
    assert len(times.ledgers("all", 1.0)) == 2
    times.delivered("3", 2.0)
    assert times.ledgers("3", 9.0)[0].seconds == 2.0


def test_of_many_requests_of_one_name_the_newest_are_told() -> None:
    times = RequestTimes(has_floor=False)
    for number in range(MAX_TOLD + 5):
        sequence = Sequence(number, request("x", 4, 1), 0, 64, list(range(4)), 4)
        times.queued(str(number), ["all"], [sequence], Arrival(*[float(number)] * 4))
    found = times.ledgers("all", 1000.0)
    assert [ledger.seconds for ledger in found] == [1000.0 - number for number in range(5, MAX_TOLD + 5)]


def test_a_ledger_does_not_grow_with_the_output() -> None:
    """100,000 tokens at 2 ms, looked at twice a second as an engine does."""
    watch, draw = Watch(StepShares()), Draw(0, 0)
    sequence = Sequence(0, request("long", 4, 9), 0, 64, [1] * 4, 4)
    watch.requests.queued("long", ["long"], [sequence], Arrival(0.0, 0.0, 0.0, 0.0))
    prompt = StepPlan((), (NewSequence(0, 0, (1,) * 4, 4, 0),), (Chunk(0, 0, 0, 4, (draw,), 0, ()),), (), 4)
    decode = StepPlan((), (), (Chunk(0, 0, 4, 1, (draw,), 0, ()),), (), 1)
    blocks = []
    for number in range(100_000):
        now = 0.002 * number
        watch.step(StepTiming(decode if number else prompt, (Waiting(),), now, now, now + 0.001))
        watch.standings(now, compiled=0)
        if number in (20_000, 99_999):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    assert watch.requests.ledgers("long", now)[0].decode_steps == 99_999
    assert abs(blocks[1] - blocks[0]) < 1_000


def test_ledgers_do_not_grow_with_the_requests() -> None:
    """Six times as many as are kept, each with all parts and the longest name that a client can give."""
    times, held = RequestTimes(has_floor=True), []
    tracemalloc.start()
    try:
        for number in range(6 * KEPT):
            id = str(number)
            sequence = Sequence(number, request(id, 4, 1), 0, 64, [1] * 1000, 4)
            times.queued(id, [f"{id:x>128}", f"answer-{id}"], [sequence], Arrival(*[float(number)] * 4))
            running = times._times[number]
            running.parts.update({part: float(at + number) for at, part in enumerate(PARTS)})
            running.first_parts = {part: float(at + number) for at, part in enumerate(PARTS)}
            times.request_ended(id, number + 1.0)
            times.delivered(id, number + 2.0)
            if (number + 1) % (3 * KEPT) == 0:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[0] < 3.5e3 * KEPT
    assert abs(held[1] - held[0]) < 64e3


def test_a_step_costs_as_much_however_many_decode() -> None:
    """256 sequences decode: noting a step must take a small part of what the host does for it."""
    times = RequestTimes(has_floor=False)
    sequences = [Sequence(at, replace(request(str(at), 4, 9), id=str(at)), 0, 64, [1] * 4, 4) for at in range(256)]
    for sequence in sequences:
        times.queued(str(sequence.id), [], [sequence], Arrival(0.0, 0.0, 0.0, 0.0))
    draws = [Draw(sequence.id, sequence.id) for sequence in sequences]
    news = tuple(NewSequence(draw.slot, draw.slot, (1,) * 4, 4, 0) for draw in draws)
    prompts = tuple(Chunk(draw.sequence, draw.slot, 0, 4, (draw,), 0, ()) for draw in draws)
    decodes = tuple(Chunk(draw.sequence, draw.slot, 4, 1, (draw,), 0, ()) for draw in draws)
    look = StepShares().look(StepPlan((), (), decodes, (), 256))
    times.step(StepTiming(StepPlan((), news, prompts, (), 1024), (Waiting(),), 0.0, 0.0, 1.0), look)
    plan = StepPlan((), (), decodes, (), 256)
    took = []
    for number in range(200):
        began = time.perf_counter()
        times.step(StepTiming(plan, (Waiting(),), number + 1.0, number + 1.0, number + 2.0), look)
        took.append(time.perf_counter() - began)
    assert min(took) < 20e-6, f"{1e6 * min(took):.1f} us"
