"""Stand-ins for the device: they know what each page holds, and one has a clock of its own. They load no torch.

The "model" is a function of all tokens before, so a stream of ids is right only if every step read what it should.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.loop import EngineLoop
from strata.engine.plan import REJECTED, Chunk, NewSequence, StepPlan, UndrawnStep
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
    return zlib.crc32(bytes([index, *(token & 0xFF for token in tokens)])) % VOCABULARY


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


@dataclass
class Run:
    """A chunk as a device runs it. tokens: of its sequence up to its last, drafts included, of which the first `known`
    are none."""

    start: int
    tokens: list[int]
    known: int


class Device:
    """Executes plans in the order of their launch, as a stream does.

    right: how likely the id that it drafts is the one that will be drawn.
    """

    def __init__(self, page_size: int, right: float = 0.5) -> None:
        self.page_size = page_size
        self.right, self.coins = right, random.Random(page_size)
        self.tables: dict[int, dict[int, int]] = {}
        self.told: dict[int, list[int]] = {}  # by slot: the ids that it was told or has drawn
        self.pages: dict[int, dict[int, tuple[int, int, Hashable]]] = {}
        self.truth: dict[int, list[int]] = {}
        self.slots: dict[int, NewSequence] = {}
        self.asked: dict[int, tuple[int, Hashable]] = {}  # the sample's number and the extra key of each sequence
        self.rejected: Counter[int] = Counter()  # drafts of each sequence, of which the host does not know
        self.carrier: Any = None  # of pages from elsewhere

    def launch(self, plan: StepPlan) -> list[int]:
        assert plan.tokens == sum(chunk.count for chunk in plan.chunks)
        for slot in plan.ended:
            del self.slots[slot]
        for new in plan.new:
            self.slots[new.slot], self.told[new.slot] = new, list(new.tokens)
            assert list(new.tokens) == self.truth.setdefault(new.id, list(new.tokens)), "not all ids are told"
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "two chunks in a slot"
        kinds = [0 if chunk.count == len(chunk.draws) == 1 else 1 + (_own(chunk) < 2) for chunk in plan.chunks]
        assert kinds == sorted(kinds), "a decode after other chunks, or drafts after a prompt"
        for source, target in plan.copies:
            if self.carrier is not None and source >= self.carrier.shelf.first:
                self.carrier.begin(source, target)
            else:
                self.pages[target] = dict(self.pages[source])
        self.runs = {chunk.slot: self._run(chunk) for chunk in plan.chunks}
        self.look(plan)
        self._write(plan)
        ids = []
        for chunk in plan.chunks:
            ids += self._draw(chunk)
        return ids

    def look(self, plan: StepPlan) -> None:
        """Check what else there is to a plan, whose chunks are `runs` by their slots."""

    def learnt(self, plan: StepPlan, ids: Iterable[int]) -> None:
        """The host has taken these ids."""
        self.rejected.subtract(draw.sequence for draw, id in zip(plan.draws, ids, strict=True) if id == REJECTED)

    def _run(self, chunk: Chunk) -> Run:
        assert self.slots[chunk.slot].id == chunk.sequence, "a chunk in another's slot"
        start, told, drafts = chunk.start - self.rejected[chunk.sequence], self.told[chunk.slot], _own(chunk) - 1
        if drafts > 0:
            assert start + chunk.count == len(told) + drafts, "drafts that are not behind the newest id"
        tokens = told[: start + chunk.count]
        while len(tokens) < start + chunk.count:
            right = next_token(tokens, self.asked[chunk.sequence][0])
            tokens.append(right if self.coins.random() < self.right else self.coins.randrange(VOCABULARY))
        return Run(start, tokens, len(tokens) - max(0, drafts))

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        self.writers: dict[int, int] = {}
        for chunk in plan.chunks:
            table = {} if chunk.first_page == 0 and chunk.new_pages else self.tables[chunk.slot]
            table.update(enumerate(chunk.new_pages, chunk.first_page))
            self.tables[chunk.slot] = table
            run = self.runs[chunk.slot]
            for position in range(run.start, len(run.tokens)):
                place = (table[position // self.page_size], position % self.page_size)
                assert place not in written, "two tokens in one place"
                assert self.carrier is None or place[0] not in self.carrier.coming, "a step writes what is to come"
                written.add(place)
                row = (run.tokens[position], position, self.asked[chunk.sequence][1])
                self.pages.setdefault(place[0], {})[place[1]] = row
                assert self.writers.setdefault(place[0], chunk.slot) == chunk.slot, "two chunks write in a page"

    def _draw(self, chunk: Chunk) -> list[int]:
        """The ids of a chunk's draws, from what its pages hold."""
        table, run, (_, extra_key) = self.tables[chunk.slot], self.runs[chunk.slot], self.asked[chunk.sequence]
        pages = [table[page] for page in range(-(-len(run.tokens) // self.page_size))]
        assert all(self.writers.get(page, chunk.slot) == chunk.slot for page in pages), (
            "a chunk reads what another one of its step writes"
        )
        read = [self.pages[pages[at // self.page_size]][at % self.page_size] for at in range(len(run.tokens))]
        assert read == [(token, position, extra_key) for position, token in enumerate(run.tokens)]
        truth = self.truth[chunk.sequence]
        assert run.tokens[: run.known] == truth[: run.known], "other ids than were drawn"
        assert not chunk.draws or run.known == len(truth), "a draw before the last token, or beyond it"
        ids: list[int] = []
        end = run.known
        for sequence, slot in chunk.draws:
            if end > run.known and (ids[-1] < 0 or ids[-1] != run.tokens[end - 1]):
                self.rejected[sequence] += 1
                ids.append(REJECTED)
                continue
            token = -1 if POISON in run.tokens[:end] else next_token(run.tokens[:end], self.asked[sequence][0])
            ids.append(token)
            self.truth[sequence].append(max(token, 0))
            self.told[slot].append(max(token, 0))
            end += _own(chunk) > 1
        return ids

    def holds(self, pages: Sequence[int], tokens: Sequence[int], extra_key: Hashable) -> bool:
        """Whether full pages hold what these tokens begin with."""
        rows = [self.pages[page][at] for page in pages for at in range(self.page_size)]
        return rows == [(tokens[position], position, extra_key) for position in range(len(rows))]

    def poisoned(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if any(token == POISON for token, *_ in self.pages[page].values())]


def _own(chunk: Chunk) -> int:
    """The draws of a chunk's own sequence."""
    return sum(draw.sequence == chunk.sequence for draw in chunk.draws)


class Unchecked:
    """A device for long loads: it looks at nothing, and draws the same id again and again."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[int, Hashable]] = {}

    def learnt(self, plan: StepPlan, ids: Iterable[int]) -> None:
        pass

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
    arrived: tuple[()] = ()
    masked: bool = False

    @property
    def size(self) -> tuple[bool, int]:
        """As if a CUDA graph served each 64 tokens."""
        return self.plan.tokens > len(self.plan.chunks), -(-self.plan.tokens // 64)

    @property
    def ended(self) -> bool:
        return self.done <= self.runner.now

    def wait(self) -> list[int]:
        self.runner.now = max(self.runner.now, self.done)
        self.runner.device.learnt(self.plan, self.ids)
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


def simulate(requests: list[Request], pages: int, run_ahead: bool, draws: int = 1) -> Simulation:
    """Run requests on a small simulated device that checks what steps read. draws: see `SchedulerConfig`."""
    allocator = PageAllocator(pages, page_size=4)
    scheduler = Scheduler(SchedulerConfig(8, 32, LONGEST, draws=draws), allocator, PrefixTree(allocator))
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
            runner.device.asked.update((sample.id, (sample.index, sample.extra_key)) for sample in added)
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
