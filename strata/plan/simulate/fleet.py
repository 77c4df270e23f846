"""A simulated server: requests come, a router gives each to one of several engines, engines fail and come back."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

from strata.engine.request import Request
from strata.engine.routing.router import NoReplica, Route, Router
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup.clock import collector_off
from strata.plan.simulate.host import HostTimes
from strata.plan.simulate.prices import StepPrices
from strata.plan.simulate.replica import EngineShape, Replica, ReplicaJob
from strata.plan.simulate.request import Outcomes, SimulatedRequest, check_order, exactly
from strata.plan.simulate.timeline import SimulatedTimeline

# How soon a server notices that an engine has ended, as measured (docs/faults.md).
NOTICED_SECONDS = 0.3


@dataclass(frozen=True)
class Failure:
    """An engine ends `at` so many seconds and serves again, empty, `down` seconds later."""

    replica: int
    at: float
    down: float


@dataclass(frozen=True)
class FleetConfig:
    """replicas: engines of `shape`. max_concurrency: most requests under way, None for no bound. in_runs: as `Replica`
    has it."""

    shape: EngineShape
    replicas: int
    max_concurrency: int | None = None
    failures: tuple[Failure, ...] = ()
    in_runs: bool = True

    def __post_init__(self) -> None:
        for failure in self.failures:
            if not 0 <= failure.replica < self.replicas:
                raise ValueError(f"engine {failure.replica} fails, but engines count from 0 to {self.replicas - 1}")
            if not (failure.at >= 0 and failure.down > 0):
                raise ValueError(f"engine {failure.replica} fails at {failure.at:g} s for {failure.down:g} s")
        for before, after in pairwise(sorted(self.failures, key=lambda one: (one.replica, one.at))):
            back = before.at + before.down
            if before.replica == after.replica and after.at < back:
                raise ValueError(
                    f"engine {after.replica} fails at {after.at:g} s, but is down from {before.at:g} to {back:g} s"
                )


class Fleet:
    """Plays requests, which come in order, to their ends: `outcomes` and `timeline` tell of them afterwards.

    One router sends all requests, as in a server with one API process; it knows the load of the engines by what it sent
    them.
    """

    def __init__(
        self, config: FleetConfig, prices: StepPrices, host: HostTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """Raises ValueError for requests that are not in order."""
        check_order(requests)
        self.outcomes = Outcomes(requests)
        self.timeline = SimulatedTimeline(config.replicas, config.replicas * config.shape.num_pages)
        self._config, self._prices, self._host, self._requests = config, prices, host, requests
        self._replicas = [self._engine(number) for number in range(config.replicas)]
        room = config.shape.num_pages * config.shape.page_size
        self._router = Router([room] * config.replicas)
        self._routes: dict[int, Route] = {}
        self._due = [math.inf] * config.replicas  # as which the next round of each is in the queue
        # Time, order, what happens then, and to which engine, request or failure.
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._under_way = 0
        self._left: deque[float] = deque()  # when requests ended whose places no others have taken yet
        self._parsed = 0.0  # when the newest request was handed to an engine

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of the engines, of those that have failed the new ones."""
        return [replica.scheduler for replica in self._replicas]

    def run(self) -> None:
        """Until nothing is under way. Raises ValueError for a request that fits into no engine."""
        for number, failure in enumerate(self._config.failures):
            self._later(failure.at, self._fail, number)
        with collector_off():  # nothing here refers to itself, and there is much to walk
            self._play_all()

    def _play_all(self) -> None:
        requests, most = self._requests, self._config.max_concurrency or math.inf
        following, sent, arrives = 0, math.inf, math.inf
        while True:
            if arrives == math.inf and following < len(requests) and self._under_way < most:
                sent = requests[following].due
                if following >= most:
                    sent = max(sent, self._left.popleft())
                begun = max(sent + self._host.request, self._parsed)
                arrives = begun + self._host.parsed(len(requests[following].prompt))
            if self._events and self._events[0][0] <= arrives:
                time, _, happens, number = heappop(self._events)
                self._pass_to(time)
                happens(number)
            elif arrives < math.inf:
                self.outcomes.sent[following] = sent
                self._parsed, arrived, arrives = arrives, following, math.inf
                following += 1
                self._under_way += 1
                if most < math.inf:  # others may be sent before it arrives
                    self._later(self._parsed, self._arrive, arrived)
                else:
                    self._pass_to(self._parsed)
                    self._arrive(arrived)
            else:
                return

    def _round(self, engine: int) -> None:
        if self._due[engine] == self._now:
            self._due[engine] = math.inf  # so that another round at the same time is queued
            self._replicas[engine].proceed()
            self._follow(engine)

    def _begin(self, number: int) -> None:
        if number in self._routes:  # not if its engine has failed meanwhile
            self._router.begun(self._routes[number])

    def _come_back(self, number: int) -> None:
        self._arrive(number, self._routes.pop(number))

    def _arrive(self, number: int, before: Route | None = None) -> None:
        """A request has come, or comes back from an engine that has failed."""
        request, caches = self._requests[number], self._config.shape.caches
        try:
            if before is None:
                route = self._router.route(request.prompt, caches=caches)
            else:
                route = self._router.reroute(before, request.prompt, caches=caches)
        except NoReplica as error:
            self._give_up(number, str(error))
            return
        self._routes[number] = route
        engine_request = Request(str(number), request.prompt, exactly(request.output_tokens), 0, request.due)
        self._replicas[route.replica].receive(self._now, ReplicaJob(number, engine_request))
        self._follow(route.replica)

    def _told(self, job: ReplicaJob, heard: float, is_last: bool) -> None:
        """See `Told`."""
        outcomes, number = self.outcomes, job.number
        if outcomes.first[number] != outcomes.first[number]:
            outcomes.first[number] = heard
            if not is_last:
                self._later(heard, self._begin, number)
        if is_last:
            outcomes.last[number] = heard
            self._later(heard, self._end, number)

    def _end(self, number: int) -> None:
        self._router.ended(self._routes.pop(number))
        self._leave()

    def _give_up(self, number: int, why: str) -> None:
        self.outcomes.faults[number] = why
        self.outcomes.last[number] = self._now
        self._leave()

    def _leave(self) -> None:
        if self._config.max_concurrency is not None:
            self._left.append(self._now)
        self._under_way -= 1

    def _fail(self, number: int) -> None:
        """Requests that nobody has had text of go to another engine, once the server has noticed; the others fail."""
        failure = self._config.failures[number]
        engine, lost = failure.replica, self._replicas[failure.replica]
        self._router.lose(engine)
        jobs = list(lost.abandon(self._now))
        self._replicas[engine] = self._engine(engine)
        self._due[engine] = math.inf
        self._follow(engine)
        self._later(self._now + failure.down, self._router.recover, engine)
        for job in jobs:
            if job.first <= self._now:
                del self._routes[job.number]
                self._give_up(job.number, "the engine has ended while the answer was under way")
            else:  # text of the step that was under way has not come
                self.outcomes.first[job.number] = math.nan
                self._later(self._now + NOTICED_SECONDS, self._come_back, job.number)

    def _engine(self, number: int) -> Replica:
        shape, intervals = self._config.shape, self.outcomes.intervals
        shape = replace(shape, scheduler=replace(shape.scheduler, seed=number))
        return Replica(shape, self._prices, self._host, intervals, self._told, in_runs=self._config.in_runs)

    def _follow(self, engine: int) -> None:
        """An engine has done something: when is it due again, and how does it stand."""
        one = self._replicas[engine]
        pages, scheduler = one.pages, one.scheduler
        used = pages.num_pages - pages.free - pages.idle
        self.timeline.note(engine, scheduler.waiting, scheduler.running, used)
        if one.wake != self._due[engine]:
            self._due[engine] = one.wake
            if one.wake < math.inf:
                self._later(one.wake, self._round, engine)

    def _pass_to(self, time: float) -> None:
        self._now = time
        self.timeline.pass_to(time)

    def _later(self, time: float, happens: Callable[[int], None], number: int) -> None:
        heappush(self._events, (time, next(self._order), happens, number))
