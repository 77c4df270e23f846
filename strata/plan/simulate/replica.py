"""One engine of a simulated server: the real loop and scheduler over a device that is not there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from strata.cache.groups import Books, PageGroup, books
from strata.cache.pages import PageAllocator
from strata.engine.loop import EngineLoop
from strata.engine.request import Request, Sequence
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.plan.simulate.host import HostTimes
from strata.plan.simulate.prices import StepPrices
from strata.plan.simulate.request import Intervals
from strata.plan.simulate.runner import BLANK, SimulatedRunner, SimulatedStep


@dataclass(frozen=True)
class EngineShape:
    """What an engine has: pages of so many tokens, a prefix tree if it `caches`. run_ahead, is_late: as a server's
    engine on a GPU launches its steps; without the first, each is waited for. groups, group_pages: of all layers, where
    some keep the rows of windows alone or fixed states, and the pages of each; none where no layer does. snapshots:
    rows for those of fixed states; None: no layer keeps one.
    """

    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    caches: bool
    run_ahead: bool = True
    is_late: bool = True
    groups: tuple[PageGroup, ...] = ()
    group_pages: tuple[int, ...] = ()
    snapshots: int | None = None

    def books(self) -> Books:
        """Of an engine that begins."""
        if not self.groups:
            return Books(PageAllocator(self.num_pages, self.page_size), (), only_windows=False)
        scheduler = self.scheduler
        return books(self.groups, self.group_pages, scheduler.max_sequences, scheduler.max_length, self.snapshots)


@dataclass(slots=True, eq=False)
class ReplicaJob:
    """A request in an engine. number: among all requests. first, last: when its client had the first and the newest of
    its ids; NaN before. samples: that have not ended."""

    number: int
    request: Request
    first: float = math.nan
    last: float = math.nan
    samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.request.params.n


@dataclass(frozen=True)
class _Run:
    """Steps of decodes alone that are not played one by one. ends: of the one that runs and of those behind it, but for
    the last; done: of the last. took: the host's seconds of each launch."""

    step: SimulatedStep
    ends: list[float]
    done: float
    took: float


Told = Callable[[ReplicaJob, float, bool], None]
"""Told of the first and of the last id of each request, and when its client has it: the last, if the flag is True."""


class Replica:
    """Plays an engine's rounds, each when the caller's clock has come to `wake`. Many rounds in which nothing but
    decoding happens are played at once, if `in_runs`: what becomes of requests is the same.

    prices: of its steps. told: see Told.
    """

    def __init__(
        self,
        shape: EngineShape,
        prices: StepPrices,
        host: HostTimes,
        intervals: Intervals,
        told: Told,
        *,
        in_runs: bool = True,
    ) -> None:
        held = shape.books()
        self.pages = held.filled
        tree = held.tree() if shape.caches else None
        self.scheduler = Scheduler(shape.scheduler, held.pages, tree, held.windows, held.snapshots)
        self.runner = SimulatedRunner(prices, host)
        ledger: Any = None  # no memory is used
        self.loop = EngineLoop(self.scheduler, self.runner, shape.run_ahead, ledger, clock=lambda: self.runner.now)
        if shape.is_late:
            self.loop.launch_late()
        self.wake = math.inf
        self._prices, self._host, self._intervals, self._told = prices, host, intervals, told
        self._in_runs = in_runs and shape.run_ahead and shape.scheduler.stages == 1
        self._run: _Run | None = None
        self._jobs: dict[str, ReplicaJob] = {}

    def receive(self, at: float, job: ReplicaJob) -> list[Sequence]:
        """A request comes. Raises ValueError if it can never run."""
        if self._run is not None:
            self._take(bisect_right(self._run.ends, at))
            while self.wake < at:  # a step was launched before it came
                self._round(at)
        self.runner.now = max(self.runner.now, at)
        added = self.loop.add(job.request)
        self._jobs[job.request.id] = job
        self._rest()
        return added

    def proceed(self) -> None:
        """Play what is due at `wake`."""
        if self._run is not None:
            self._take(len(self._run.ends))
        else:
            self._round(math.inf)

    def abandon(self, at: float) -> Iterator[ReplicaJob]:
        """The engine ends: its requests, in the order in which they came."""
        if self._run is not None:
            self._take(bisect_right(self._run.ends, at))
        self.scheduler.reset()
        jobs, self._jobs = self._jobs, {}
        self.wake = math.inf
        yield from jobs.values()

    def _round(self, until: float) -> None:
        """until: no run is begun if something comes then."""
        runner = self.runner
        runner.now = max(runner.now, self.wake)
        output = self.loop.step()
        if output is not None and output.updates:
            runner.now += self._host.deliver(len(output.updates))
            heard = runner.now + self._host.answer
            for update in output.updates:
                job = self._jobs[update.sequence.request.id]
                self._deliver(job, heard, has_ended=update.finish_reason is not None)
        if until == math.inf and self._in_runs and (run := self._next_run()) is not None:
            self._run, self.wake = run, run.ends[-1]
        else:
            self._rest()

    def _rest(self) -> None:
        """Until the next round is due."""
        self.wake = math.inf if self.loop.idle else self.runner.now + self.loop.delay

    def _deliver(self, job: ReplicaJob, heard: float, *, has_ended: bool) -> None:
        """An id of a sample of a request, which ends with it or goes on."""
        job.samples -= has_ended
        is_last = not job.samples
        if job.first != job.first:
            job.first = heard
            self._told(job, heard, is_last)
        else:
            self._intervals.add(heard - job.last)
            if is_last:
                self._told(job, heard, True)
        job.last = heard
        if is_last:
            del self._jobs[job.request.id]

    def _next_run(self) -> _Run | None:
        """The rounds that can be played at once; None if there are none, or the host might launch one of them late."""
        step, late, host = self.runner.newest, self.loop.late, self._host
        if step is None or step.is_read or (late is not None and not late.is_steady):
            return None
        rounds = self.scheduler.decode_runs.longest(step.plan)
        if not rounds:
            return None
        count = step.plan.tokens
        took = host.launch(count)
        keys = sum([sequence.computed for sequence in self.scheduler.decode_runs.sequences])
        shared = self.scheduler.decode_runs.shared
        line = self._prices.decodes(count, keys + count, shared)
        shortest = line.seconds(keys + count)
        launched = self.runner.now + self.loop.delay + took
        if launched >= step.done or host.deliver(count) + took >= 0.9 * shortest or line.slope < 0:
            return None
        ends, done, reads = [step.done], step.done, keys
        for _ in range(rounds):
            reads += count
            if reads >= line.upto:
                line = self._prices.decodes(count, reads, shared)
            done += line.base + line.slope * reads
            ends.append(done)
        ends.pop()
        return _Run(step, ends, done, took)

    def _take(self, rounds: int) -> None:
        """Play the first rounds of the run, and no more of it."""
        run, self._run = self._run, None
        assert run is not None
        if rounds:
            step, count, ends = run.step, run.step.plan.tokens, run.ends[:rounds]
            delivered = self._host.deliver(count)
            self._note_intervals(ends, delivered + self._host.answer)
            self.scheduler.decode_runs.take(rounds, _blank)
            step.done = self.runner.busy_until = run.ends[rounds] if rounds < len(run.ends) else run.done
            if self.loop.late is not None:
                self.loop.late.repeated(ends, count, run.took)
            self.runner.now = ends[-1] + delivered
        self._rest()

    def _note_intervals(self, ends: list[float], heard_after: float) -> None:
        first, last = ends[0] + heard_after, ends[-1] + heard_after
        running = self.scheduler.decode_runs.sequences
        for sequence in running:
            job = self._jobs[sequence.request.id]
            self._intervals.add(first - job.last)
            job.last = last
        self._intervals.add_between(ends, len(running))


def _blank(sequence: Sequence, count: int) -> list[int]:
    return [BLANK] * count
