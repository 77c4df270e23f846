"""Stand-ins for the device: they know what each page holds, and one has a clock of its own. They load no torch.

The "model" is a function of all tokens before, so a stream of ids is right only if every step read what it should.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.loop import EngineLoop
from strata.engine.plan import NewSequence, StepPlan, UndrawnStep
from strata.engine.request import Request
from strata.engine.request import Sequence as Sample
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler

VOCABULARY = 23
EOS = 0
STOP_ID = 1
STOP_TEXT = 2  # ends the sequence as a stop string would: found by the host after `complete`
POISON = VOCABULARY  # from this prompt token on all keys and values are NaN, and no id can be drawn


def next_token(tokens: list[int], index: int) -> int:
    return zlib.crc32(bytes([index, *tokens])) % VOCABULARY


def uncrowded(request: Request, index: int, longest: int) -> tuple[list[int], str, int | str | None]:
    """Outputs, finish reason and stop reason of one sample, from the definitions alone."""
    params, tokens, outputs = request.params, list(request.prompt), []
    if POISON in tokens:
        return [], "error", None
    while True:
        token = next_token(tokens, index)
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return outputs, "stop", None
            if token in (params.stop_token_ids or ()):
                return outputs, "stop", token
            if token == STOP_TEXT and params.detokenize:
                return outputs, "stop", "text"
        if len(outputs) == params.max_tokens or len(tokens) == longest:
            return outputs, "length", None


class Device:
    """Executes plans in the order of their launch, as a stream does."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tables: dict[int, dict[int, int]] = {}
        self.newest: dict[int, int] = {}
        self.pages: dict[int, dict[int, tuple[int, int, str]]] = {}
        self.truth: dict[int, list[int]] = {}
        self.slots: dict[int, NewSequence] = {}
        self.asked: dict[int, tuple[int, str]] = {}  # the sample's number and the salt of each sequence

    def launch(self, plan: StepPlan) -> list[int]:
        assert plan.tokens == sum(chunk.count for chunk in plan.chunks)
        for slot in plan.ended:
            del self.slots[slot]
        for new in plan.new:
            self.slots[new.slot] = new
            assert list(new.tokens) == self.truth.setdefault(new.id, list(new.tokens)), "not all ids are told"
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "two chunks in a slot"
        kinds = [chunk.count == 1 and len(chunk.draws) == 1 for chunk in plan.chunks]
        assert kinds == sorted(kinds, reverse=True), "a decode after other chunks"
        for source, target in plan.copies:
            self.pages[target] = dict(self.pages[source])
        written: set[tuple[int, int]] = set()
        writers: dict[int, int] = {}
        for chunk in plan.chunks:
            table = {} if chunk.first_page == 0 and chunk.new_pages else self.tables[chunk.slot]
            table.update(enumerate(chunk.new_pages, chunk.first_page))
            self.tables[chunk.slot] = table
            assert self.slots[chunk.slot].id == chunk.sequence, "a chunk in another's slot"
            salt = self.asked[chunk.sequence][1]
            for position in range(chunk.start, chunk.start + chunk.count):
                known = self.slots[chunk.slot].tokens
                token = known[position] if position < len(known) else self.newest[chunk.slot]
                place = (table[position // self.page_size], position % self.page_size)
                assert place not in written, "two tokens in one place"
                written.add(place)
                self.pages.setdefault(place[0], {})[place[1]] = (token, position, salt)
                assert writers.setdefault(place[0], chunk.slot) == chunk.slot, "two chunks write in a page"
        ids = []
        for chunk in plan.chunks:
            pages = [self.tables[chunk.slot][page] for page in range(-(-(chunk.start + chunk.count) // self.page_size))]
            assert all(writers.get(page, chunk.slot) == chunk.slot for page in pages), (
                "a chunk reads what another one of its step writes"
            )
            truth = self.truth[chunk.sequence]
            end = chunk.start + chunk.count
            read = [
                self.pages[self.tables[chunk.slot][position // self.page_size]][position % self.page_size]
                for position in range(end)
            ]
            salt = self.asked[chunk.sequence][1]
            assert read == [(token, position, salt) for position, token in enumerate(truth[:end])]
            assert not chunk.draws or end == len(truth), "a draw before the last token, or beyond it"
            for sequence, slot in chunk.draws:
                token = -1 if POISON in truth[:end] else next_token(truth[:end], self.asked[sequence][0])
                self.newest[slot] = max(token, 0)
                ids.append(token)
        for sequence, slot in plan.draws:
            self.truth[sequence].append(self.newest[slot])
        return ids

    def poisoned(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if any(token == POISON for token, *_ in self.pages[page].values())]


class Unchecked:
    """A device for long loads: it looks at nothing, and draws the same id again and again."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[int, str]] = {}

    def launch(self, plan: StepPlan) -> list[int]:
        return [STOP_TEXT] * len(plan.draws)


SECONDS_A_STEP, SECONDS_A_TOKEN = 0.01, 0.001


def linear(plan: StepPlan) -> float:
    """Seconds of a step that depend on its tokens alone."""
    return SECONDS_A_STEP + SECONDS_A_TOKEN * plan.tokens


@dataclass
class SimulatedStep:
    """wait: passes the time until the device has done the step."""

    runner: SimulatedRunner
    plan: StepPlan
    ids: list[int]
    done: float
    logprobs: None = None
    prompt_logprobs: tuple[()] = ()
    masked: bool = False

    @property
    def size(self) -> tuple[bool, int]:
        """As if a recording served each 64 tokens."""
        return self.plan.tokens > len(self.plan.chunks), -(-self.plan.tokens // 64)

    @property
    def ended(self) -> bool:
        return self.done <= self.runner.now

    def wait(self) -> list[int]:
        self.runner.now = max(self.runner.now, self.done)
        return self.ids


class SimulatedRunner:
    """A device whose steps take a time that follows from their plans; `now` is the host's clock, in seconds.

    host: seconds of a launch. steps: all of them, with their begin and end on the device.
    """

    def __init__(
        self,
        device: Device | Unchecked,
        seconds: Callable[[StepPlan], float],
        host: Callable[[StepPlan], float] = lambda plan: 0.0,
    ) -> None:
        self.device, self.seconds, self.host = device, seconds, host
        self.now = self.busy_until = self.busy = 0.0
        self.steps: list[tuple[StepPlan, float, float]] = []
        self.observer: Any = None

    def launch(self, plan: StepPlan) -> SimulatedStep:
        took = self.seconds(plan)
        self.now += self.host(plan)
        self.busy += took
        begin = max(self.busy_until, self.now)
        self.busy_until = begin + took
        self.steps.append((plan, begin, self.busy_until))
        return SimulatedStep(self, plan, self.device.launch(plan), self.busy_until)

    def mask(self, step: Any, matchers: Sequence[Any]) -> UndrawnStep:
        raise NotImplementedError

    def draw(self, step: Any) -> SimulatedStep:
        raise NotImplementedError

    def settle(self) -> None:
        self.now = max(self.now, self.busy_until)


@dataclass
class Simulation:
    """What came of a load: samples, when their requests got the first and the last id, and each sample all of its."""

    scheduler: Scheduler
    runner: SimulatedRunner
    samples: list[Sample] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)


LONGEST = 64


def simulate(requests: list[Request], pages: int, run_ahead: bool) -> Simulation:
    """Run requests on a small simulated device that checks what steps read."""
    allocator = PageAllocator(pages, page_size=4)
    scheduler = Scheduler(SchedulerConfig(8, 32, LONGEST), allocator, PrefixTree(allocator))
    return drive(scheduler, SimulatedRunner(Device(4), linear), requests, run_ahead)


def drive(
    scheduler: Scheduler, runner: SimulatedRunner, requests: list[Request], run_ahead: bool, late: bool = False
) -> Simulation:
    """Run requests, each from its arrival on. late: each step is launched as late as the loop allows."""
    ledger: Any = None  # no memory is planned
    loop = EngineLoop(scheduler, runner, run_ahead, ledger, clock=lambda: runner.now)
    if late:
        loop.launch_late()
    found = Simulation(scheduler, runner)
    waiting = sorted(requests, key=lambda request: request.arrival)
    while waiting or not loop.idle:
        if loop.idle:
            runner.now = max(runner.now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= loop.clock():
            added = loop.add(waiting.pop(0))
            found.samples += added
            runner.device.asked.update((sample.id, (sample.index, sample.request.salt)) for sample in added)
        delay = loop.delay
        if delay:
            arrival = waiting[0].arrival if waiting else math.inf
            runner.now = min(runner.now + delay, max(arrival, runner.now))
            continue
        output = loop.step()
        for update in output.updates if output is not None else ():
            name = update.sequence.request.id
            found.first.setdefault(name, loop.clock())
            found.last[name] = loop.clock()
            found.times.setdefault(update.sequence.id, []).append(loop.clock())
    scheduler.check()
    return found


def load(count: int) -> list[Request]:
    """Requests that arrive in bursts: prompts that begin alike, samples that fork, ends of all kinds."""
    source = random.Random(count)
    common = [source.choices(range(3, VOCABULARY), k=20) for _ in range(3)]
    requests = []
    for number in range(count):
        own = source.choices(range(3, VOCABULARY), k=source.randint(1, 12))
        prompt = source.choice(common)[: source.choice([0, 9, 20])] + own
        params = SamplingParams(
            n=source.choice([1, 1, 1, 3]),
            max_tokens=source.choice([1, 4, 12, 24]),
            ignore_eos=source.random() < 0.5,
            stop_token_ids=[STOP_ID] if source.random() < 0.5 else None,
            detokenize=False,
        )
        arrival = 2.0 * (number // 20) + source.random()
        requests.append(Request(str(number), tuple(prompt), params, 0, arrival, "", frozenset([EOS])))
    return requests
