"""A simulated server: requests come, a router gives each to one of several engines, engines fail and come back."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

from strata.engine.request import Request
from strata.engine.routing.router import NoReplica, Route, Router
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.startup.clock import collector_off
from strata.plan.simulate.handover import Handover, received_prices, received_shape
from strata.plan.simulate.host import HostTimes
from strata.plan.simulate.prices import StepPrices
from strata.plan.simulate.replica import EngineShape, Replica, ReplicaJob
from strata.plan.simulate.request import Outcomes, SimulatedRequest, blank_prompt, check_order, exactly
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
    """replicas: engines of `shape`. max_concurrency: most requests under way, None for no bound. handover: how the
    first of the engines, which compute prompts alone, hand sequences to the others; None: all do both. in_runs: see
    `Replica`."""

    shape: EngineShape
    replicas: int
    max_concurrency: int | None = None
    failures: tuple[Failure, ...] = ()
    handover: Handover | None = None
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
        if self.handover is not None and not 0 < self.handover.prefill < self.replicas:
            raise ValueError(
                f"{self.handover.prefill} of {self.replicas} engines compute prompts alone: at least one has to, and "
                "at least one other to decode"
            )
        if self.handover is not None and self.shape.groups:
            raise ValueError("engines that hand sequences on are simulated without windows and fixed states of layers")
        if self.handover is not None and self.failures:
            raise ValueError("engines that hand sequences on are simulated without failures")


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
        self._prefill = 0 if config.handover is None else config.handover.prefill
        self._replicas = [self._engine(number) for number in range(config.replicas)]
        room = config.shape.num_pages * config.shape.page_size
        self._router = Router([room] * (self._prefill or config.replicas))
        self._decoders = Router([room] * (config.replicas - self._prefill)) if self._prefill else None
        self._routes: dict[int, Route] = {}
        self._due = [math.inf] * config.replicas  # as which the next round of each is in the queue
        self._events: list[tuple[float, int, int, int]] = []  # time, order, kind, engine or request
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
            self._later(failure.at, _FAIL, number)
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
                self._play(*heappop(self._events))
            elif arrives < math.inf:
                self.outcomes.sent[following] = sent
                self._parsed, arrived, arrives = arrives, following, math.inf
                following += 1
                self._under_way += 1
                if most < math.inf:  # others may be sent before it arrives
                    self._later(self._parsed, _ARRIVE, arrived)
                else:
                    self._pass_to(self._parsed)
                    self._arrive(arrived)
            else:
                return

    def _play(self, time: float, _: int, kind: int, number: int) -> None:
        self._pass_to(time)
        if kind == _ROUND:
            if self._due[number] == time:
                self._due[number] = math.inf  # so that another round at the same time is queued
                self._replicas[number].proceed()
                self._follow(number)
        elif kind == _ARRIVE:
            self._arrive(number)
        elif kind == _NOTICED:
            self._arrive(number, self._routes.pop(number))
        elif kind == _BEGUN:
            if number in self._routes:  # not if its engine has failed meanwhile
                self._router.begun(self._routes[number])
        elif kind == _ENDED:
            self._end(number)
        elif kind == _HANDED:
            self._hand_over(number)
        elif kind == _FAIL:
            self._fail(self._config.failures[number])
        elif kind == _RECOVER:
            self._router.recover(number)

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
        output = 1 if self._prefill else request.output_tokens
        self._submit(route.replica, ReplicaJob(number, self._request(number, request.prompt, output)))

    def _submit(self, engine: int, job: ReplicaJob) -> None:
        self._replicas[engine].receive(self._now, job)
        self._follow(engine)

    def _request(self, number: int, prompt: tuple[int, ...], output: int) -> Request:
        return Request(str(number), prompt, exactly(output), 0, self._requests[number].due)

    def _told(self, job: ReplicaJob, heard: float, is_last: bool) -> None:
        """See `Told`."""
        outcomes, number = self.outcomes, job.number
        if outcomes.first[number] != outcomes.first[number]:
            outcomes.first[number] = heard
            if not is_last:
                self._later(heard, _BEGUN, number)
        if is_last:
            outcomes.last[number] = heard
            self._later(heard, _ENDED, number)

    def _told_of_prompt(self, job: ReplicaJob, heard: float, is_last: bool) -> None:
        """An engine that computes prompts alone has the first id of a request."""
        handover, request = self._config.handover, self._requests[job.number]
        assert handover is not None
        self.outcomes.first[job.number] = heard
        if request.output_tokens == 1:
            self.outcomes.last[job.number] = heard
            self._later(heard, _ENDED, job.number)
        else:
            self._later(heard + handover.seconds(len(request.prompt)), _HANDED, job.number)

    def _hand_over(self, number: int) -> None:
        """The keys and values of a prompt have come to the engines that decode."""
        assert self._decoders is not None
        self._router.ended(self._routes.pop(number))
        prompt = blank_prompt(len(self._requests[number].prompt) + 1)
        route = self._routes[number] = self._decoders.route(prompt, caches=False)
        self._decoders.begun(route)
        output = self._requests[number].output_tokens - 1
        first = self.outcomes.first[number]
        job = ReplicaJob(number, self._request(number, prompt, output), first, first)
        self._submit(self._prefill + route.replica, job)

    def _end(self, number: int) -> None:
        route = self._routes.pop(number)
        has_decoded = self._decoders is not None and self._requests[number].output_tokens > 1
        (self._decoders if has_decoded and self._decoders is not None else self._router).ended(route)
        self._leave()

    def _give_up(self, number: int, why: str) -> None:
        self.outcomes.faults[number] = why
        self.outcomes.last[number] = self._now
        self._leave()

    def _leave(self) -> None:
        if self._config.max_concurrency is not None:
            self._left.append(self._now)
        self._under_way -= 1

    def _fail(self, failure: Failure) -> None:
        """Requests that nobody has had text of go to another engine, once the server has noticed; the others fail."""
        engine, lost = failure.replica, self._replicas[failure.replica]
        self._router.lose(engine)
        jobs = list(lost.abandon(self._now))
        self._replicas[engine] = self._engine(engine)
        self._due[engine] = math.inf
        self._follow(engine)
        self._later(self._now + failure.down, _RECOVER, engine)
        for job in jobs:
            if job.first <= self._now:
                del self._routes[job.number]
                self._give_up(job.number, "the engine has ended while the answer was under way")
            else:  # text of the step that was under way has not come
                self.outcomes.first[job.number] = math.nan
                self._later(self._now + NOTICED_SECONDS, _NOTICED, job.number)

    def _engine(self, number: int) -> Replica:
        shape, prices, told = self._config.shape, self._prices, self._told
        if self._prefill and number < self._prefill:
            told = self._told_of_prompt
        elif self._prefill:
            shape, prices = received_shape(shape), received_prices(prices)
        shape = replace(shape, scheduler=replace(shape.scheduler, seed=number))
        return Replica(shape, prices, self._host, self.outcomes.intervals, told, in_runs=self._config.in_runs)

    def _follow(self, engine: int) -> None:
        """An engine has done something: when is it due again, and how does it stand."""
        one = self._replicas[engine]
        pages, scheduler = one.pages, one.scheduler
        used = pages.num_pages - pages.free - pages.idle
        self.timeline.note(engine, scheduler.waiting, scheduler.running, used)
        if one.wake != self._due[engine]:
            self._due[engine] = one.wake
            if one.wake < math.inf:
                self._later(one.wake, _ROUND, engine)

    def _pass_to(self, time: float) -> None:
        self._now = time
        self.timeline.pass_to(time)

    def _later(self, time: float, kind: int, number: int) -> None:
        heappush(self._events, (time, next(self._order), kind, number))


_ROUND, _ARRIVE, _NOTICED, _BEGUN, _ENDED, _HANDED, _FAIL, _RECOVER = range(8)
